"""Turns a text, or a pair of texts, into token ids as the tokenizer's own template says, cut to a length."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import Violation, invalid
from blockyard.panics import panics_as_errors

if TYPE_CHECKING:
    import tokenizers


class EncodedPair(NamedTuple):
    """Token ids. `second_from`: the first of those with token type 1; 0: there are none."""

    token_ids: tuple[int, ...]
    second_from: int = 0


@panics_as_errors()
def encode_pair(
    backend: tokenizers.Tokenizer,
    first: str,
    second: str | None = None,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    side: str = "right",
) -> EncodedPair:
    """Encodes one text or two; raises BlockyardError FIELD_INVALID for half a surrogate pair.

    Args:
        backend: of the model.
        first: the text, or the query.
        second: the document.
        add_special_tokens: those of the tokenizer's template.
        max_tokens: of all, the template's among them; of two texts the longer one is cut. None: nothing is cut.
        side: from which texts are cut, "left" or "right".
    """
    try:
        texts = [backend.encode(text, add_special_tokens=False) for text in (first, second) if text is not None]
    except TypeError:
        raise invalid([Violation("inputs", "must be Unicode text, and has half a surrogate pair")]) from None
    if max_tokens is not None:
        num_special = backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        rooms = _share(max(max_tokens - num_special, 0), [len(text.ids) for text in texts])
        for text, room in zip(texts, rooms, strict=True):
            text.truncate(room, direction=side)
    whole = backend.post_process(texts[0], texts[1] if second is not None else None, add_special_tokens)
    types = whole.type_ids
    return EncodedPair(tuple(whole.ids), types.index(1) if 1 in types else 0)


def _share(room: int, lengths: list[int]) -> list[int]:
    """Shares a room among texts: each token that is cut is the longer one's, of two that are as long the second's."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    first, second = lengths
    shorter = min(first, second, room // 2)
    if first <= shorter:
        return [first, room - first]
    if second <= shorter:
        return [room - second, second]
    return [room - room // 2, room // 2]
