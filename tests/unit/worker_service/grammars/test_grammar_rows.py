"""Rows with grammars: what their masks allow, whatever has become of the row, and failures that stay their own."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.errors import BlockyardError, Reason, from_status
from blockyard.grammars.limits import PARSER_LIMITS
from tests.kit.panics import GRAMMAR as PANICS
from tests.kit.panics import panic
from tests.unit.worker_service import driver
from worker_service.grammars import matchers
from worker_service.grammars.matchers import WORD_BITS, Grammars, GrammarState, read_vocabulary
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance import LLTokenizer

    from tests.unit.worker_service.driver import WorkerDriver

END = 2
SOME = "start: /[ab]{3}/ /[cd]+/"
MALFORMED = {
    "start: (": Reason.FIELD_INVALID,
    "": None,
    '{"grammars": [{}]}': Reason.FIELD_INVALID,
    "start: <no_such_token>": Reason.FIELD_INVALID,
    'start: %json {"not": {}}': Reason.FIELD_INVALID,
    f'start: "{"x" * 400_000}"': Reason.GRAMMAR_TOO_COMPLEX,
    'start: "a" "\x00': Reason.FIELD_INVALID,
    PANICS: Reason.BUG,
}


@pytest.fixture(scope="module")
def size(model_config: Any) -> int:
    return model_config.vocab_size


@pytest.fixture(scope="session")
def model_config(model: Path) -> Any:
    return load_model(model, torch.float32, torch.device("cpu"), lambda done, total: None, "reference").config


@pytest.fixture(scope="module")
def vocabulary(model: Path, size: int) -> LLTokenizer:
    return read_vocabulary(model, size)


@pytest.fixture(scope="module")
def grammars(vocabulary: LLTokenizer, size: int) -> Grammars:
    return Grammars(vocabulary, size)


def follow(grammars: Grammars, grammar: str, output: list[int] | None = None) -> GrammarState:
    return grammars.follow(grammar, np.array(output or [], np.int64), np.array([END], np.int64))


def allowed(grammars: Grammars, *states: GrammarState) -> list[list[int]]:
    """The ids that each state's mask allows."""
    words = grammars.begin_masks(list(enumerate(states))).join()
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_a_mask_allows_what_the_grammar_says_next(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    texts = ["a", "b", "ab", "ba", "aab", "c", "cd"]
    single = {text: ids[0] for text in texts if len(ids := vocabulary.tokenize_str(text)) == 1}
    assert {"a", "b", "c"} <= single.keys()
    state = follow(grammars, SOME)
    [first] = allowed(grammars, state)
    assert single["a"] in first
    assert single["c"] not in first
    assert END not in first
    for _ in range(3):
        state.add(single["a"])
    [then] = allowed(grammars, state)
    assert single["c"] in then
    assert {single["a"], END}.isdisjoint(then)
    state.add(single["c"])
    [last] = allowed(grammars, state)
    assert {single["c"], END} <= set(last)


def test_a_state_is_a_function_of_its_output(grammars: Grammars) -> None:
    state, output = follow(grammars, SOME), list[int]()
    twin = state.copy()
    for _ in range(8):
        again, early = follow(grammars, SOME, output), twin.copy()
        masks = allowed(grammars, state, again, early)
        assert masks[0] == masks[1] == masks[2]
        token_id = masks[0][len(output) * 7 % len(masks[0])]
        if token_id == END:
            break
        output.append(token_id)
        state.add(token_id)
        twin.add(token_id)


def test_forks_go_their_own_ways(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    a, c = (vocabulary.tokenize_str(text)[0] for text in "ac")
    parent = follow(grammars, 'start: ("a" "a") | ("c" "c")')
    before = parent.copy()
    allowed(grammars, parent)
    after = parent.copy()
    for each, token_id in ((parent, a), (before, c), (after, c)):
        each.add(token_id)
    masks = allowed(grammars, parent, before, after)
    assert masks[0] == [a]
    assert masks[1] == masks[2] == [c]


def test_ends_before_min_tokens_are_no_part_of_the_grammar(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    a = vocabulary.tokenize_str("a")[0]
    state = follow(grammars, 'start: "a"', [a, END, END])
    assert allowed(grammars, state) == [[END]]
    assert grammars.begin_masks([(4, state)]).leaves_only(4, np.array([END]))
    assert not grammars.begin_masks([(4, state)]).leaves_only(3, np.array([END]))


def test_a_stop_token_of_plain_text_comes_at_an_end_alone(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    a, b = (vocabulary.tokenize_str(text)[0] for text in "ab")
    state = grammars.follow("start: /[ab]{3}/", np.array([], np.int64), np.array([a, END], np.int64))
    for _ in range(3):
        [ids] = allowed(grammars, state)
        assert b in ids
        assert {a, END}.isdisjoint(ids)
        state.add(b)
    assert set(allowed(grammars, state)[0]) == {a, END}


def test_no_id_beyond_the_model_is_allowed(vocabulary: LLTokenizer, size: int) -> None:
    few = size - WORD_BITS // 2
    grammars = Grammars(vocabulary, few)
    words = grammars.begin_masks([(0, follow(grammars, "start: /.*/"))]).join()
    assert words.shape == (1, -(-few // WORD_BITS))


def test_an_output_that_is_not_of_the_grammar_fails(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    state = follow(grammars, SOME, vocabulary.tokenize_str("x"))
    assert allowed(grammars, state) == [[]]
    assert state.failure is not None
    assert state.failure.reason is Reason.GRAMMAR_DEAD_END


def test_a_grammar_that_nothing_completes_is_told_as_such(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    state = follow(grammars, 'start: ("a" rest | "b")\nrest: rest "x"', vocabulary.tokenize_str("a"))
    assert allowed(grammars, state) == [[]]
    assert state.failure is not None
    assert state.failure.reason is Reason.GRAMMAR_DEAD_END
    assert "can never be completed" in str(state.failure)


def test_few_grammars_are_kept(vocabulary: LLTokenizer, size: int) -> None:
    grammars = Grammars(vocabulary, size)
    first = grammars.prepare(SOME)
    assert grammars.prepare(SOME) is first
    large = [grammars.prepare(f'start: "a" // {number} {"x" * 200_000}') for number in range(16)]
    assert grammars.prepare(SOME) is not first
    assert grammars.prepare(f'start: "a" // 15 {"x" * 200_000}') is large[15]


def test_without_a_vocabulary_rows_say_why(model: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(BlockyardError) as raised:
        read_vocabulary(tmp_path, size)
    grammars = Grammars(raised.value, size)
    state = follow(grammars, SOME)
    assert allowed(grammars, state) == [[]]
    assert state.failure is not None
    assert state.failure.reason is Reason.FEATURE_DISABLED
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BlockyardError, match="cannot be used for grammars"):
        read_vocabulary(tmp_path, size)


def test_rows_hold_nothing_of_those_that_failed_before(grammars: Grammars) -> None:
    first, second = (follow(grammars, "start: (") for _ in range(2))
    assert allowed(grammars, first, second) == [[], []]
    assert first.failure is not None
    assert first.failure is second.failure
    assert first.failure.__traceback__ is None


def test_rows_use_up_no_limit_of_one_another(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    grammar = "start: /[ab]*a[ab]{16}c/"
    a, b = (vocabulary.tokenize_str(text)[0] for text in "ab")
    before = follow(grammars, grammar, [a])
    masks = allowed(grammars, before)
    long = follow(grammars, grammar, np.random.default_rng(0).choice([a, b], 40_000).tolist())
    assert allowed(grammars, long) == [[]]
    assert long.failure is not None
    assert long.failure.reason is Reason.GRAMMAR_TOO_COMPLEX
    assert allowed(grammars, before, follow(grammars, grammar, [a])) == [*masks, *masks]


def test_a_row_that_comes_back_reaches_a_limit_where_it_would_have(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    grammar, a = 'start: "a" x{100000}\nx: "a"', vocabulary.tokenize_str("a")[0]
    state = follow(grammars, grammar)
    assert allowed(grammars, state) == [[a]]
    state.add(a)
    for each in (state, follow(grammars, grammar, [a])):
        assert allowed(grammars, each) == [[]]
        assert each.failure is not None
        assert each.failure.reason is Reason.GRAMMAR_TOO_COMPLEX


TOOL = """start: %json {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8},
"days": {"type": "integer", "minimum": 1}}, "required": ["city", "days"], "additionalProperties": false,
"x-guidance": {"whitespace_flexible": false}}"""
ANSWER = '{"city":"Oslo","days":12}'


@pytest.mark.parametrize("limit", ["step_lexer_fuel", "max_lexer_states", "step_max_items"])
def test_drafts_bring_no_limit_nearer(
    limit: str, vocabulary: LLTokenizer, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mask costs depends on the masks before it: a draft must leave all of that as it is."""
    output = vocabulary.tokenize_str(ANSWER)

    def reaches_the_end(number: int, asks_what_is_forced: bool) -> bool:
        monkeypatch.setattr(matchers, "parser_limits", lambda _: PARSER_LIMITS | {limit: number})
        grammars = Grammars(vocabulary, size)
        state, forced = follow(grammars, TOOL), []
        for token_id in output:
            if asks_what_is_forced:
                forced += state.forced_token_ids(8, size)
            if not allowed(grammars, state)[0]:
                return False
            state.add(token_id)
        assert bool(forced) == asks_what_is_forced
        return True

    least = [
        bisect_left(range(PARSER_LIMITS[limit]), True, key=lambda number: reaches_the_end(number, asks))
        for asks in (False, True)
    ]
    assert 0 < least[0] == least[1]


def test_what_a_grammar_forces_is_told_within_its_vocabulary(grammars: Grammars, vocabulary: LLTokenizer) -> None:
    state = follow(grammars, 'start: "abc"')
    assert state.forced_token_ids(8, 1000) == []
    allowed(grammars, state)
    ids = state.forced_token_ids(8, 1000)
    assert vocabulary.decode_str(ids) == "abc"
    assert state.forced_token_ids(1, 1000) == ids[:1]
    assert state.forced_token_ids(8, max(ids)) == []


def test_a_mask_that_is_asked_for_again_is_the_same(grammars: Grammars) -> None:
    state = follow(grammars, SOME)
    assert allowed(grammars, state) == allowed(grammars, state)


def test_what_leads_far_ends_no_process(grammars: Grammars) -> None:
    chain = "\n".join(f'a{place}: a{place + 1} "a"' for place in range(5000))
    state = follow(grammars, f'start: a0\n{chain}\na5000: "b"')
    assert allowed(grammars, state, state.copy())[0]
    assert state.failure is None


async def test_a_malformed_grammar_fails_alone(worker: WorkerDriver) -> None:
    alone = await decode(worker.open(1), SOME)
    stream, hostile = worker.open(2), dict(enumerate(MALFORMED, 10))
    new = [sequence(1, [5, 6, 7], SOME), *(sequence(number, [5, 6], text) for number, text in hostile.items())]
    ids, num_new_tokens = [1, *hostile], [3] + [2] * len(hostile)
    response = await stream.step(new_sequences=new, sequence_ids=ids, num_new_tokens=num_new_tokens)
    told = {each.sequence_id: from_status(each.status).reason for each in response.failures}
    assert told == {number: reason for number, text in hostile.items() if (reason := MALFORMED[text])}
    tokens = dict(zip(response.sequence_ids, response.token_ids, strict=True))
    assert [tokens[1], *await stream.decode(1, 3)] == alone


class Broken:
    """A matcher whose every method panics, as llguidance's own do nowhere that is known."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: panic()


def test_a_panic_ends_its_row_alone(grammars: Grammars) -> None:
    good, bad = follow(grammars, SOME), follow(grammars, SOME)
    [first] = allowed(grammars, bad)
    bad._matcher = Broken()  # type: ignore[assignment]
    fork = bad.copy()
    bad.add(first[0])
    masks = allowed(grammars, bad, good, fork)
    assert masks[0] == []
    # A fork whose matcher cannot be copied has the compiled grammar's.
    assert masks[1] == masks[2] != []
    assert good.failure is fork.failure is None
    assert bad.failure is not None
    assert bad.failure.reason is Reason.BUG
    assert "🙂" not in bad.failure.message


def test_a_panic_where_a_grammar_is_compiled_ends_its_rows_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_compile", lambda grammar: panic())
    bad, good = follow(grammars, f"{SOME} // another"), follow(grammars, SOME)
    [first, second] = allowed(grammars, bad, good)
    assert (first, bool(second), good.failure) == ([], True, None)
    assert bad.failure is not None
    assert bad.failure.reason is Reason.BUG


def test_a_vocabulary_that_makes_llguidance_panic_disables_grammars(
    model: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llguidance.LLTokenizer", lambda *arguments, **options: panic())
    with pytest.raises(BlockyardError) as raised:
        read_vocabulary(model, size)
    assert raised.value.reason is Reason.FEATURE_DISABLED


async def decode(stream: driver.StepDriver, grammar: str) -> list[int]:
    new = [sequence(1, [5, 6, 7], grammar)]
    first = await stream.sampled(new_sequences=new, sequence_ids=[1], num_new_tokens=[3])
    return [first[1], *await stream.decode(1, 3)]


def sequence(sequence_id: int, token_ids: list[int], grammar: str) -> Any:
    sampling = driver.sampling(grammar=grammar)
    blocks = [3 * sequence_id]
    return driver.new_sequence(sequence_id, token_ids, blocks, sampling=sampling, stop_token_ids=[END])
