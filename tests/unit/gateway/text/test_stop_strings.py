from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import Match, StopStringMatcher

# Few letters, so that stop strings overlap, repeat and contain one another.
letters = st.text("ab€", min_size=0, max_size=40)
stop_sets = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


def first_to_complete(text: str, stop_strings: tuple[str, ...], num_free: int = 0) -> tuple[str, int] | None:
    """The oracle: the stop string with the least end beyond `num_free`, the longest of them, and its end."""
    for end in range(num_free + 1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def run(matcher: StopStringMatcher, pieces: list[str], num_free_pieces: int = 0) -> tuple[str, str | None]:
    """Feeds pieces; returns all text that came out, and the stop string that matched."""
    given_out = ""
    for number, piece in enumerate(pieces):
        found = matcher.push(piece, may_match=number >= num_free_pieces)
        if isinstance(found, Match):
            return given_out + found.text, found.stop_string
        given_out += found
    return given_out + matcher.flush(), None


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(place, len(text)) for place in cuts})
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


@given(letters, stop_sets, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_the_first_to_complete_ends_the_text_however_it_is_cut(
    text: str, stop_strings: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    expected = first_to_complete(text, stop_strings)
    given_out, matched = run(StopStringMatcher(stop_strings, include_in_output=include), cut(text, cuts))
    if expected is None:
        assert (given_out, matched) == (text, None)
    else:
        stop_string, end = expected
        assert matched == stop_string
        assert given_out == text[: end if include else end - len(stop_string)]


@given(letters, stop_sets, st.lists(st.integers(0, 40), max_size=8), st.integers(0, 5))
def test_only_what_completes_after_the_free_part_counts(
    text: str, stop_strings: tuple[str, ...], cuts: list[int], num_free_pieces: int
) -> None:
    pieces = cut(text, cuts)
    num_free = len("".join(pieces[:num_free_pieces]))
    expected = first_to_complete(text, stop_strings, num_free)
    given_out, matched = run(StopStringMatcher(stop_strings), pieces, num_free_pieces)
    assert matched == (expected and expected[0])
    if expected is not None and num_free <= expected[1] - len(expected[0]):
        assert given_out == text[: expected[1] - len(expected[0])]


@given(letters, stop_sets)
def test_no_more_is_held_than_may_become_a_match(text: str, stop_strings: tuple[str, ...]) -> None:
    if first_to_complete(text, stop_strings) is not None:
        return
    matcher = StopStringMatcher(stop_strings)
    released = matcher.push(text)
    assert isinstance(released, str)
    beginnings = {stop[:length] for stop in stop_strings for length in range(len(stop))}
    assert text[len(released) :] == max((b for b in beginnings if text.endswith(b)), key=len)


def test_text_is_prompt_where_no_match_can_come() -> None:
    matcher = StopStringMatcher(("\n\nUser:",))
    assert matcher.push("hello") == "hello"
    assert matcher.push(" there\n") == " there"
    assert matcher.push("and") == "\nand"


@pytest.mark.parametrize("include", [False, True])
def test_of_two_that_complete_together_the_longer_counts(include: bool) -> None:
    found = StopStringMatcher(("c", "bc"), include_in_output=include).push("abcd")
    assert found == Match("bc", "abc" if include else "a")


def test_a_match_that_began_in_the_free_part_counts_when_it_completes_after() -> None:
    matcher = StopStringMatcher(("\n\n",))
    assert matcher.push("a\n", may_match=False) == "a"
    assert matcher.push("\nb") == Match("\n\n", "")


def test_a_match_inside_the_free_part_does_not_count() -> None:
    matcher = StopStringMatcher(("stop",))
    assert run(matcher, ["a stop", " b"], num_free_pieces=1) == ("a stop b", None)


def test_few_large_automata_are_kept() -> None:
    def count() -> int:
        gc.collect()
        return sum(type(each).__name__ == "_Node" for each in gc.get_objects())

    before, size = count(), 2000
    for number in range(16):
        StopStringMatcher((f"{number}" + "a" * size,))
    assert size < count() - before < 10 * size


@pytest.mark.parametrize("size", [1, 1000])
def test_the_sequences_of_a_request_share_an_automaton(size: int) -> None:
    first, second = (StopStringMatcher(("a" * size, "b" * size)) for _ in range(2))
    assert first._root is second._root
