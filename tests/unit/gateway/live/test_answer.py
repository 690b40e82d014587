from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.contract.events import Delta
from blockyard.contract.sampling import FinishReason, StopCriteria
from gateway.live.answer import MAX_UNREAD_TOKENS, AnswerRules, Ended, Place, SequenceAnswer
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END_TOKEN_IDS = demo_tokenizer().end_token_ids


def make(
    *, return_token_ids: bool = True, end_token_ids: frozenset[int] = END_TOKEN_IDS, **stop: Any
) -> SequenceAnswer:
    options = StopCriteria(**stop)
    rules = AnswerRules(options, end_token_ids, end_token_ids.union(options.stop_token_ids), return_token_ids)
    return SequenceAnswer(0, rules, demo_tokenizer().make_detokenizer(()))


class Taker:
    """A reader of an answer."""

    def __init__(self, answer: SequenceAnswer) -> None:
        self.answer = answer
        self.place = Place(0, 0)

    def take(self) -> Delta | None:
        """Returns what is new since the last call."""
        delta = self.answer.delta_after(*self.place)
        if delta is not None:
            self.place = Place(delta.num_tokens, delta.num_text_bytes)
        return delta


def run(
    answer: SequenceAnswer, token_ids: list[int], reason: FinishReason, taken_after: set[int] | None = None
) -> list[Delta]:
    """Pushes tokens and takes deltas after some of them (all, unless told) and at the end."""
    deltas: list[Delta | None] = []
    reader = Taker(answer)
    for position, token_id in enumerate(token_ids):
        if answer.push(token_id) or answer.ended:
            break
        is_last = position == len(token_ids) - 1
        if not is_last and (taken_after is None or position in taken_after):
            answer.advance()
            deltas.append(reader.take())
    answer.finish(reason)
    deltas.append(reader.take())
    assert reader.take() is None
    return [delta for delta in deltas if delta is not None]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def token_ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def test_tokens_merge_until_somebody_takes_them() -> None:
    answer = make()
    for token_id in ids_of("there was a cat"):
        assert answer.push(token_id) is False
    assert answer.delta_after(0, 0) is None
    answer.advance()
    delta = answer.delta_after(0, 0)
    num_tokens = len(ids_of("there was a cat"))
    assert delta == Delta(0, "there was a cat", tuple(ids_of("there was a cat")), num_tokens, 15)


def test_nothing_new_is_no_delta() -> None:
    answer = make(return_token_ids=False)
    answer.push(ids_of("😀")[0])
    assert answer.advance() is False
    assert answer.delta_after(0, 0) is None


def test_the_length_ends_with_all_text() -> None:
    answer = make()
    deltas = run(answer, ids_of("a cat"), LENGTH)
    assert (text_of(deltas), answer.ended) == ("a cat", Ended(LENGTH, None))
    assert answer.num_tokens == len(ids_of("a cat"))


def test_an_end_token_is_an_id_and_no_text() -> None:
    answer = make()
    deltas = run(answer, [*ids_of("a cat"), END_TOKEN], STOP)
    assert text_of(deltas) == "a cat"
    assert token_ids_of(deltas) == [*ids_of("a cat"), END_TOKEN]
    assert answer.ended == Ended(STOP, None)
    assert answer.num_tokens == len(ids_of("a cat")) + 1


@pytest.mark.parametrize(("include", "text"), [(False, "a cat"), (True, "a cat.")])
def test_a_stop_token_is_told_and_its_text_returned_only_if_included(include: bool, text: str) -> None:
    (dot,) = ids_of(".")
    answer = make(stop_token_ids=(dot,), include_stop_in_output=include)
    assert text_of(run(answer, [*ids_of("a cat"), dot], STOP)) == text
    assert answer.ended == Ended(STOP, dot)


def test_an_end_token_that_is_ignored_but_a_stop_token_is_told() -> None:
    answer = make(end_token_ids=frozenset(), stop_token_ids=(END_TOKEN,), ignore_eos=True)
    run(answer, [20, END_TOKEN], STOP)
    assert answer.ended == Ended(STOP, END_TOKEN)


def test_incomplete_bytes_before_the_end_are_flushed() -> None:
    answer = make()
    assert text_of(run(answer, [*ids_of("😀")[:2], END_TOKEN], STOP)).endswith("\ufffd")


def test_a_stop_string_cuts_the_text_but_not_the_ids() -> None:
    token_ids = ids_of("one. two")
    answer = make(stop_strings=(". t",))
    deltas = run(answer, [*token_ids, *ids_of(" three")], LENGTH)
    assert text_of(deltas) == "one"
    assert answer.ended == Ended(STOP, ". t")
    ids = token_ids_of(deltas)
    assert len(ids) == answer.num_tokens
    assert demo_tokenizer().decode(ids).startswith("one. t")
    assert ". t" not in demo_tokenizer().decode(ids[:-1])


def test_a_stop_string_may_be_included() -> None:
    answer = make(stop_strings=(". t",), include_stop_in_output=True)
    assert text_of(run(answer, ids_of("one. two three"), LENGTH)) == "one. t"


def test_what_is_held_back_comes_when_the_sequence_ends() -> None:
    answer = make(stop_strings=("catalogue",))
    for token_id in ids_of("a cat"):
        answer.push(token_id)
    answer.advance()
    held = answer.delta_after(0, 0)
    assert held is not None and held.text == "a "
    answer.finish(LENGTH)
    rest = answer.delta_after(held.num_tokens, held.num_text_bytes)
    assert rest is not None and rest.text == "cat"
    assert answer.ended == Ended(LENGTH, None)


def test_a_stop_string_in_the_last_token_goes_before_the_length() -> None:
    answer = make(stop_strings=("cat",))
    assert text_of(run(answer, ids_of("a cat"), LENGTH)) == "a "
    assert answer.ended == Ended(STOP, "cat")


def test_the_text_of_an_end_token_is_not_searched() -> None:
    rules = AnswerRules(StopCriteria(stop_strings=("<|end",)), END_TOKEN_IDS, END_TOKEN_IDS, False)
    answer = SequenceAnswer(0, rules, demo_tokenizer().make_detokenizer((), skip_special_tokens=False))
    for token_id in [*ids_of("a cat"), 3]:
        answer.push(token_id)
    answer.finish(STOP)
    assert answer.ended == Ended(STOP, None)


def test_without_a_reader_a_stop_string_is_found_soon() -> None:
    answer = make(stop_strings=("cat",))
    tokens = [*ids_of("a cat"), *([20] * (2 * MAX_UNREAD_TOKENS))]
    found = next(position for position, token_id in enumerate(tokens) if answer.push(token_id))
    assert found <= len(ids_of("a cat")) + MAX_UNREAD_TOKENS
    assert answer.ended == Ended(STOP, "cat")
    delta = answer.delta_after(0, 0)
    assert delta is not None and delta.text == "a " and delta.num_tokens == len(ids_of("a cat"))


def test_without_a_reader_the_text_of_a_stop_token_stays_hidden() -> None:
    (dot,) = ids_of(".")
    answer = make(stop_strings=("never",), stop_token_ids=(dot,))
    for token_id in [*([20] * MAX_UNREAD_TOKENS), dot]:
        answer.push(token_id)
    answer.finish(STOP)
    delta = answer.delta_after(0, 0)
    assert delta is not None and delta.text == demo_tokenizer().decode([20] * MAX_UNREAD_TOKENS)


def test_min_tokens_hold_for_stop_strings() -> None:
    token_ids = ids_of("cat cat cat")
    first, second = (len(ids_of(text)) for text in ("cat", "cat cat"))
    answer = make(stop_strings=("cat",), min_tokens=first)
    assert text_of(run(answer, token_ids, LENGTH)) == "cat "
    assert answer.num_tokens == second


def oracle(token_ids: list[int], stop_strings: tuple[str, ...], min_tokens: int) -> tuple[str, str | None, int]:
    """The text, the match and the tokens of ids, from whole decodings only."""
    tokenizer = demo_tokenizer()

    def settled(count: int) -> str:
        text = tokenizer.decode(token_ids[:count])
        return text.rstrip("\ufffd") if count < len(token_ids) else text

    for count in range(1, len(token_ids) + 1):
        text = settled(count)
        before = settled(count - 1) if count - 1 else ""
        if count <= min_tokens:
            continue
        for end in range(len(before) + 1, len(text) + 1):
            ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
            if ending:
                longest = max(ending, key=len)
                return text[: end - len(longest)], longest, count
    return tokenizer.decode(token_ids), None, len(token_ids)


words = st.lists(
    st.sampled_from(["the ", "cat ", "s", "at", ".", "\n", "ö", "😀", " the", "x"]), min_size=1, max_size=30
).map("".join)


@given(
    words,
    st.lists(st.sampled_from(["the", "cat s", "\n\n", ".s", "😀", "at t", "t"]), max_size=3).map(tuple),
    st.integers(0, 12),
    st.one_of(st.none(), st.sets(st.integers(0, 40))),
)
@settings(max_examples=300)
def test_text_and_usage_are_a_function_of_the_tokens_and_the_rules(
    text: str, stop_strings: tuple[str, ...], min_tokens: int, taken_after: set[int] | None
) -> None:
    token_ids = ids_of(text)
    answer = make(stop_strings=stop_strings, min_tokens=min_tokens)
    deltas = run(answer, token_ids, LENGTH, taken_after)
    # A match that began within the first tokens is given out in part before it completes.
    expected_text, matched, num_tokens = oracle(token_ids, stop_strings, min_tokens)
    assert answer.ended == Ended(STOP if matched else LENGTH, matched)
    assert answer.num_tokens == num_tokens
    assert token_ids_of(deltas) == token_ids[:num_tokens]
    assert text_of(deltas) == expected_text
    total = 0
    for delta in deltas:
        total += len(delta.text.encode())
        assert delta.num_text_bytes == total
