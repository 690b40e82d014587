"""Encodes a text slice by slice, so that others have turns between them, and no further than is asked for.

Each function is a generator: it yields how many characters its next step takes, and returns its result. Whoever runs
it decides when the next step is done, and in which thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gateway.text.vocabulary import encode_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import tokenizers

    from gateway.text.safe_cuts import SafeCuts
    from gateway.text.vocabulary import Vocabulary

T = TypeVar("T")
Steps = Generator[int, None, T]

SLICE_CHARACTERS = 65_536
"""Characters of a slice, about: some tens of milliseconds."""


class Encoded(NamedTuple):
    """Token ids. `is_whole`: they are all that the text has; otherwise those of its beginning or its end."""

    token_ids: tuple[int, ...]
    is_whole: bool


def run_steps(steps: Steps[T]) -> T:
    """Runs all steps here and now."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def join_steps(steps: Steps[T]) -> Steps[T]:
    """Joins short steps, since each takes a change of threads."""
    num_characters = 0
    while True:
        try:
            size = next(steps)
        except StopIteration as stop:
            return stop.value
        if num_characters + size > SLICE_CHARACTERS:
            yield max(size, SLICE_CHARACTERS)
            num_characters = 0
        num_characters += size


def run_all(each: Iterable[Steps[T]]) -> Steps[list[T]]:
    """Runs steps one after another."""
    results: list[T] = []
    for steps in each:
        results.append((yield from steps))
    return results


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
