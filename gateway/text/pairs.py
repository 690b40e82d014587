"""Encodes a text or a pair of texts with the tokenizer's own template, truncated to a length."""

from __future__ import annotations

from typing import NamedTuple

import tokenizers

from blockyard.errors import Violation, invalid
from gateway.text.vocabulary import Steps, Vocabulary, encode_slices


class EncodedPair(NamedTuple):
    """Token ids. `second_from`: the index of the first token with token type 1; 0: none has it.

    `is_whole`: false if the text is so long that only its beginning was encoded.
    """

    token_ids: tuple[int, ...]
    second_from: int = 0
    is_whole: bool = True


def encode_pair(
    vocabulary: Vocabulary,
    first: str,
    second: str | None = None,
    *,
    add_special_tokens: bool = True,
    max_tokens: int | None = None,
    side: str = "right",
    enough: int | None = None,
) -> Steps[EncodedPair]:
    """Encodes one text or two, step by step; raises BlockyardError FIELD_INVALID for half a surrogate pair.

    Args:
        vocabulary: the model's vocabulary, whose backend encodes.
        first: the text, or the query.
        second: the document; None: there is only one text.
        add_special_tokens: whether the template's special tokens are added.
        max_tokens: the limit for all tokens, special tokens included; the longer of two texts is cut. None: no limit.
        side: the side on which texts are cut, "left" or "right".
        enough: the number of tokens of a text after which encoding stops, if it is not cut before.
    """
    backend = vocabulary.backend
    if max_tokens is not None:
        # Tokens beyond the limit are cut in any case, so the full length of a text makes no difference.
        enough = max_tokens if enough is None else min(max_tokens, enough)
    from_end = max_tokens is not None and side == "left"
    texts: list[tokenizers.Encoding] = []
    is_whole = True
    for text in (first, second) if second is not None else (first,):
        try:
            slices, has_all = yield from encode_slices(vocabulary, text, enough=enough, from_end=from_end)
        except TypeError:
            raise invalid([Violation("inputs", "must be Unicode text, but contains half a surrogate pair")]) from None
        texts.append(slices[0] if len(slices) == 1 else tokenizers.Encoding.merge(slices, False))
        is_whole = is_whole and (has_all or enough == max_tokens)
    if max_tokens is not None:
        num_special = backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        rooms = _share(max(max_tokens - num_special, 0), [len(text.ids) for text in texts])
        for text, room in zip(texts, rooms, strict=True):
            text.truncate(room, direction=side)
    whole = backend.post_process(texts[0], texts[1] if second is not None else None, add_special_tokens)
    types = whole.type_ids
    return EncodedPair(tuple(whole.ids), types.index(1) if 1 in types else 0, is_whole)


def _share(room: int, lengths: list[int]) -> list[int]:
    """Divides a limit among texts. Each token to cut is taken from the longer text; of equal texts, from the second."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    first, second = lengths
    shorter = min(first, second, room // 2)
    if first <= shorter:
        return [first, room - first]
    if second <= shorter:
        return [room - second, second]
    return [room - room // 2, room // 2]
