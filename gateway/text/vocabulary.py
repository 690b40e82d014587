"""The vocabulary of a model, and how texts become ids of it: slice by slice, and no further than is asked for.

The functions that encode are generators: each yields how many characters its next step takes, and returns its result.
The caller decides when, and in which thread, the next step is done, so that other texts have turns between the slices.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gateway.text.safe_cuts import SafeCuts, cuts_of
from gateway.text.text_bounds import NO_BOUNDS, TextBounds, bounds_of_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers

T = TypeVar("T")
Steps = Generator[int, None, T]

SLICE_CHARACTERS = 65_536
"""Characters of a slice, about: some tens of milliseconds."""

# The library works in the thread that calls it. Its own pool has one thread for each processor, shared by all callers:
# a short text would wait there behind long ones.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces of a model, and how a text becomes ids of them."""

    backend: tokenizers.Tokenizer
    """Has the pieces, the special tokens and how ids become text."""
    encode: Callable[[str, bool], Sequence[int]]
    """Turns a text into ids, and adds special tokens at its ends or not; TypeError for half a surrogate pair."""
    backend_encodes: bool = False
    """Whether the backend makes the same ids, and so knows pairs of texts and how to cut them."""
    bounds: TextBounds = NO_BOUNDS
    """How few tokens a text can have."""
    cuts: SafeCuts | None = None
    """Where texts can be cut, and encoded part by part; None: nowhere."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Vocabulary:
        """Returns one whose backend encodes too."""
        # Some files carry the settings of a training run, which would cut or pad prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        description: dict[str, Any] = json.loads(backend.to_str())
        bounds = bounds_of_backend(backend, description)
        cuts = cuts_of(description, backend.get_vocab(with_added_tokens=False))
        return cls(backend, lambda text, specials: encode_text(backend, text, specials).ids, True, bounds, cuts)


def encode_text(backend: tokenizers.Tokenizer, text: str, specials: bool = False) -> tokenizers.Encoding:
    """Encodes a text, without offsets; TypeError for half a surrogate pair.

    `encode` has the interpreter stand still until it is done; a batch lets other threads run.
    """
    return backend.encode_batch_fast([text], add_special_tokens=specials)[0]


class Encoded(NamedTuple):
    """Token ids. `is_whole`: they are all that the text has; otherwise those of its beginning or its end."""

    token_ids: tuple[int, ...]
    is_whole: bool


def encode_slices(
    vocabulary: Vocabulary, text: str, *, enough: int | None = None, from_end: bool = False
) -> Steps[tuple[list[tokenizers.Encoding], bool]]:
    """Encodes a text without special tokens; TypeError for half a surrogate pair.

    Args:
        vocabulary: one whose backend encodes.
        text: the text.
        enough: tokens, of which the text's beginning or end is encoded at least; None: all of it.
        from_end: it is the text's end.

    Returns the encodings of the slices in order, and whether they are the whole text.
    """
    if vocabulary.cuts is None or len(text) <= SLICE_CHARACTERS:
        yield len(text)
        return [encode_text(vocabulary.backend, text)], True
    encodings: list[tokenizers.Encoding] = []
    num_tokens, rest = 0, (0, len(text))
    while rest[0] < rest[1] and (enough is None or num_tokens < enough):
        start, stop, rest = _cut(vocabulary.cuts, text, *rest, from_end=from_end)
        yield stop - start
        encodings.append(encode_text(vocabulary.backend, text[start:stop]))
        num_tokens += len(encodings[-1])
    return encodings[::-1] if from_end else encodings, rest[0] == rest[1]


def _cut(cuts: SafeCuts, text: str, start: int, stop: int, *, from_end: bool) -> tuple[int, int, tuple[int, int]]:
    """Returns the next slice of what is left of a text, and what is left then."""
    if from_end:
        place = max(cuts.before(text, stop - SLICE_CHARACTERS), start)
        return place, stop, (start, place)
    place = min(cuts.behind(text, start + SLICE_CHARACTERS), stop)
    return start, place, (place, stop)


def encode_steps(
    vocabulary: Vocabulary,
    text: str,
    *,
    add_special_tokens: bool = True,
    enough: int | None = None,
    from_end: bool = False,
) -> Steps[Encoded]:
    """Encodes a text as the vocabulary does, or its beginning or end alone: see `encode_slices`."""
    if vocabulary.cuts is None or len(text) <= SLICE_CHARACTERS:
        yield len(text)
        return Encoded(tuple(vocabulary.encode(text, add_special_tokens)), True)
    encodings, is_whole = yield from encode_slices(vocabulary, text, enough=enough, from_end=from_end)
    before, behind = find_specials(vocabulary.backend) if add_special_tokens else ((), ())
    if not is_whole:
        before, behind = ((), behind) if from_end else (before, ())
    return Encoded((*before, *itertools.chain.from_iterable(each.ids for each in encodings), *behind), is_whole)


def find_specials(backend: tokenizers.Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Finds the special tokens that stand before a text and behind it."""
    whole = backend.post_process(encode_text(backend, "a"), None, True)
    is_special, ids = whole.special_tokens_mask, whole.ids
    start = is_special.index(0)
    stop = len(ids) - is_special[::-1].index(0)
    return ids[:start], ids[stop:]
