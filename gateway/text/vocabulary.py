"""Encodes texts with a model's vocabulary in slices, and only as far as the caller needs.

The functions that encode are generators: each yields the number of characters before each step, and returns its result.
The caller decides when and in which thread to run the next step, so that other texts have turns between the slices.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
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
"""The approximate number of characters in a slice, which takes some tens of milliseconds to encode."""

# Make the library work in the calling thread. All callers would share the library's own thread pool, in which a short
# text would wait behind long ones.
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces of a model, and the functions that turn texts into their ids."""

    backend: tokenizers.Tokenizer
    """The library's tokenizer with the pieces and the special tokens; it turns ids into text."""
    encode: Callable[[str, bool], Sequence[int]]
    """Turns a text into ids, with or without special tokens at its ends; raises TypeError for half a surrogate pair."""
    backend_encodes: bool = False
    """Whether the backend itself encodes, so that it can also encode and truncate pairs of texts."""
    bounds: TextBounds = NO_BOUNDS
    """Lower bounds for the number of a text's tokens."""
    cuts: SafeCuts | None = None
    """Finds places at which a text can be cut to encode its parts; None: texts must be encoded in one piece."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Vocabulary:
        """Returns the vocabulary of a backend that also encodes."""
        # Some files contain truncation and padding settings of a training run, which would change prompts silently.
        backend.no_truncation()
        backend.no_padding()
        description: dict[str, Any] = json.loads(backend.to_str())
        bounds = bounds_of_backend(backend, description)
        cuts = cuts_of(description, backend.get_vocab(with_added_tokens=False))
        return cls(backend, lambda text, specials: encode_text(backend, text, specials).ids, True, bounds, cuts)


def encode_text(backend: tokenizers.Tokenizer, text: str, specials: bool = False) -> tokenizers.Encoding:
    """Encodes a text, without offsets; raises TypeError for half a surrogate pair.

    Uses a batch of one text, because `encode` would hold the interpreter's lock.
    """
    return backend.encode_batch_fast([text], add_special_tokens=specials)[0]


class Encoded(NamedTuple):
    """Token ids, unsigned. `is_whole`: whether they are those of the whole text, not only of its beginning or end.

    An array is smaller than a tuple, and a prompt is kept as long as its request.
    """

    token_ids: array[int]
    is_whole: bool


def encode_slices(
    vocabulary: Vocabulary, text: str, *, enough: int | None = None, from_end: bool = False
) -> Steps[tuple[list[tokenizers.Encoding], bool]]:
    """Encodes a text without special tokens; raises TypeError for half a surrogate pair.

    Args:
        vocabulary: a vocabulary whose backend encodes.
        text: the text.
        enough: the number of tokens after which encoding stops; None: the whole text is encoded.
        from_end: whether encoding begins at the text's end.

    Returns the encodings of the slices in order, and whether they cover the whole text.
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
    """Returns the bounds of the next slice of a text's rest, and the bounds of the new rest."""
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
    """Encodes a text as `vocabulary.encode` does, or only its beginning or end: see `encode_slices`."""
    if vocabulary.cuts is None or len(text) <= SLICE_CHARACTERS:
        yield len(text)
        return Encoded(array("I", vocabulary.encode(text, add_special_tokens)), True)
    encodings, is_whole = yield from encode_slices(vocabulary, text, enough=enough, from_end=from_end)
    before, behind = find_specials(vocabulary.backend) if add_special_tokens else ((), ())
    if not is_whole:
        before, behind = ((), behind) if from_end else (before, ())
    token_ids = itertools.chain(before, *(each.ids for each in encodings), behind)
    return Encoded(array("I", token_ids), is_whole)


def find_specials(backend: tokenizers.Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the special tokens that are added before and after a text."""
    whole = backend.post_process(encode_text(backend, "a"), None, True)
    is_special, ids = whole.special_tokens_mask, whole.ids
    start = is_special.index(0)
    stop = len(ids) - is_special[::-1].index(0)
    return ids[:start], ids[stop:]
