from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.sampling import BeamSearch, EarlyStopping, SamplingParams, StopCriteria
from blockyard.errors import Reason, Violation
from gateway.request import GenerationRequest
from gateway.validation import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    ModelLimits,
    as_float32,
    complete,
    derive_seed,
    find_violations,
)

LIMITS = ModelLimits("demo", vocab_size=100, max_model_len=32, end_token_ids=frozenset({0, 3}))
PROMPT = (5, 6, 7, 8)


def request(**fields: Any) -> GenerationRequest:
    """A right request with these fields; those of sampling and stop by their own names."""
    sampling = {name: fields.pop(name) for name in SamplingParams.__slots__ if name in fields}
    stop = {name: fields.pop(name) for name in StopCriteria.__slots__ if name in fields}
    return GenerationRequest(
        **{"prompt": "text", "request_id": "r1", **fields},
        sampling=SamplingParams(**sampling),
        stop=StopCriteria(**stop),
    )


def violations(
    prompt_token_ids: tuple[int, ...] = PROMPT, bad_word_ids: tuple[tuple[int, ...], ...] = (), **fields: Any
) -> list[Violation]:
    return find_violations(request(**fields), prompt_token_ids, LIMITS, bad_word_ids=bad_word_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": 64},
        {"n": 4, "temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"top_k": 0},
        {"top_k": 2**32 - 1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1e-6},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logit_bias": {0: -100.0, 99: 100.0}},
        {"max_tokens": 1},
        {"max_tokens": 28},
        {"max_tokens": 5, "min_tokens": 5},
        {"min_tokens": 28},
        {"stop_strings": tuple("abcdefghijklmnop")},
        {"stop_strings": ("x" * MAX_STOP_STRING_CHARACTERS,)},
        {"stop_token_ids": (0, 99)},
        {"model": "demo"},
        {"request_id": "A.z_0:-" + "x" * 121},
        {"request_id": ""},
        {"prompt": PROMPT},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"allowed_token_ids": (0, 99)},
        {"predicted_token_ids": (0, 99)},
        {"allowed_token_ids": (5, 6), "bad_token_sequences": ((5,), (6, 6))},
        {"bad_words": ("a", " ", "x" * MAX_BAD_WORD_CHARACTERS)},
        {"bad_words": ("a",) * MAX_BAD_WORDS, "bad_token_sequences": ((1,),) * MAX_BAD_WORDS},
        {"bad_token_sequences": ((0, 99), (1,) * MAX_BAD_SEQUENCE_TOKENS)},
        {"priority": -(2**31)},
        {"priority": 2**31 - 1},
        {"max_queue_seconds": 1e-9},
        {"max_queue_seconds": 315_576_000_000},
        {"beam_search": BeamSearch(2)},
        {"beam_search": BeamSearch(32, -2.5, EarlyStopping.NEVER), "n": 32},
        {"beam_search": BeamSearch(4), "temperature": 0.7, "seed": 1, "repetition_penalty": 1.5, "prompt_logprobs": 1},
        {"beam_search": BeamSearch(4), "stop_token_ids": (9,), "min_tokens": 2, "bad_words": ("a",)},
    ],
)
def test_what_is_right(fields: dict[str, Any]) -> None:
    assert violations(**fields) == []


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 65}),
        *[("sampling.temperature", {"temperature": value}) for value in (-0.1, INF, -INF, NAN, 1e39)],
        *[("sampling.top_p", {"top_p": value}) for value in (0.0, -0.1, 1.1, NAN, 1e-60)],
        *[("sampling.top_k", {"top_k": value}) for value in (-1, 2**32)],
        *[("sampling.min_p", {"min_p": value}) for value in (-0.1, 1.1, NAN)],
        *[("sampling.presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, NAN, INF)],
        *[("sampling.frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1, NAN, INF)],
        *[("sampling.repetition_penalty", {"repetition_penalty": value}) for value in (0.0, -1.0, INF, NAN, 1e-60)],
        *[("sampling.seed", {"seed": value}) for value in (-1, 2**64)],
        *[("sampling.logit_bias", {"logit_bias": value}) for value in ({100: 1.0}, {-1: 1.0})],
        ("sampling.logit_bias", {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)}),
        *[("sampling.logit_bias", {"logit_bias": {1: value}}) for value in (100.5, -101.0, NAN, INF)],
        ("stop.max_tokens", {"max_tokens": 0}),
        ("stop.max_tokens", {"max_tokens": 32}),
        ("stop.min_tokens", {"min_tokens": -1}),
        ("stop.min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("stop.min_tokens", {"min_tokens": 29}),
        ("stop.stop_strings", {"stop_strings": ("a", "")}),
        ("stop.stop_strings", {"stop_strings": ("x",) * (MAX_STOP_STRINGS + 1)}),
        ("stop.stop_strings", {"stop_strings": ("x" * (MAX_STOP_STRING_CHARACTERS + 1),)}),
        ("stop.stop_token_ids", {"stop_token_ids": (1, 100)}),
        *[("request_id", {"request_id": value}) for value in (" ", "ä", "a/b", "a" * 129, "a\n", "r~2")],
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": (), "prompt_token_ids": ()}),
        ("prompt", {"prompt_token_ids": (1, 100)}),
        ("prompt", {"prompt_token_ids": (1, -1)}),
        *[("sampling.logprobs", {"logprobs": value}) for value in (-1, 21)],
        *[("sampling.prompt_logprobs", {"prompt_logprobs": value}) for value in (-1, 21)],
        ("sampling.allowed_token_ids", {"allowed_token_ids": (1, 100)}),
        ("sampling.predicted_token_ids", {"predicted_token_ids": (1, 100)}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": (5, 6), "bad_token_sequences": ((5,), (7, 5), (6,))}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": (5, 6), "bad_word_ids": ((6,), (5,))}),
        ("sampling.bad_words", {"bad_words": ("a", "")}),
        ("sampling.bad_words", {"bad_words": ("a",) * (MAX_BAD_WORDS + 1)}),
        ("sampling.bad_words", {"bad_words": ("x" * (MAX_BAD_WORD_CHARACTERS + 1),)}),
        ("sampling.bad_token_sequences", {"bad_token_sequences": ((1,), ())}),
        ("sampling.bad_token_sequences", {"bad_token_sequences": ((1, 100),)}),
        ("sampling.bad_token_sequences", {"bad_token_sequences": ((1,),) * (MAX_BAD_WORDS + 1)}),
        ("sampling.bad_token_sequences", {"bad_token_sequences": ((1,) * (MAX_BAD_SEQUENCE_TOKENS + 1),)}),
        *[("priority", {"priority": value}) for value in (-(2**31) - 1, 2**31)],
        *[
            ("max_queue_time", {"max_queue_seconds": value})
            for value in (0.0, -1.0, NAN, INF, 1e-60, 315_576_000_001.0)
        ],
        *[("beam_search.width", {"beam_search": BeamSearch(width)}) for width in (-1, 0, 1, 33)],
        *[("beam_search.length_penalty", {"beam_search": BeamSearch(2, value)}) for value in (INF, -INF, NAN, 1e39)],
        ("n", {"beam_search": BeamSearch(2), "n": 3}),
    ],
)
def test_what_is_wrong_is_told_with_its_field(field: str, fields: dict[str, Any]) -> None:
    (violation,) = violations(**fields)
    assert violation.field == field
    assert violation.reason is Reason.FIELD_INVALID
    assert violation.description


@pytest.mark.parametrize(
    ("field", "fields"), [("stop.stop_strings", {"stop_strings": ("a",)}), ("sampling.logprobs", {"logprobs": 0})]
)
def test_what_a_beam_search_cannot_is_unsupported(field: str, fields: dict[str, Any]) -> None:
    assert violations(**fields) == []
    (violation,) = violations(beam_search=BeamSearch(2), **fields)
    assert (violation.field, violation.reason) == (field, Reason.UNSUPPORTED_PARAMETER)


def test_everything_that_is_wrong_with_new_parameters_is_told_at_once() -> None:
    found = violations(
        n=5,
        logprobs=21,
        prompt_logprobs=-1,
        priority=2**40,
        max_queue_seconds=0.0,
        allowed_token_ids=(100,),
        bad_words=("",),
        bad_token_sequences=((),),
        beam_search=BeamSearch(1, NAN),
        stop_strings=("a",),
    )
    assert [violation.field for violation in found] == [
        "sampling.logprobs",
        "sampling.prompt_logprobs",
        "priority",
        "max_queue_time",
        "beam_search.width",
        "beam_search.length_penalty",
        "sampling.bad_words",
        "sampling.bad_token_sequences",
        "sampling.allowed_token_ids",
        "stop.stop_strings",
        "sampling.logprobs",
    ]


def test_another_model_is_not_found() -> None:
    (violation,) = violations(model="gpt-2")
    assert (violation.field, violation.reason) == ("model", Reason.MODEL_NOT_FOUND)
    assert "demo" in violation.description


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_a_prompt_that_leaves_no_room_is_too_long(length: int) -> None:
    (violation,) = violations((5,) * length, max_tokens=5)
    assert (violation.field, violation.reason) == ("prompt", Reason.PROMPT_TOO_LONG)
    assert str(length) in violation.description and "31" in violation.description


def test_a_prompt_that_leaves_room_for_one_is_right() -> None:
    assert violations((5,) * 31) == []


def test_too_many_tokens_are_told_with_both_numbers() -> None:
    (violation,) = violations(max_tokens=100)
    assert "100" in violation.description and "28" in violation.description
    assert "This model's maximum context length is 32 tokens" in violation.description


@pytest.mark.parametrize(("max_tokens", "reason"), [(29, "PROMPT_TOO_LONG"), (31, "PROMPT_TOO_LONG")])
def test_an_answer_with_room_behind_a_shorter_prompt_blames_the_prompt(max_tokens: int, reason: str) -> None:
    (violation,) = violations(max_tokens=max_tokens)
    assert (violation.field, violation.reason) == ("stop.max_tokens", Reason(reason))


def test_an_answer_without_room_behind_any_prompt_blames_the_length() -> None:
    (violation,) = violations(max_tokens=32)
    assert (violation.field, violation.reason) == ("stop.max_tokens", Reason.FIELD_INVALID)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 9}, "n"),
        ({"n": 64}, "n"),
        ({"beam_search": BeamSearch(9), "n": 2}, "beam_search.width"),
        ({"n": 8}, None),
        ({"beam_search": BeamSearch(8), "n": 8}, None),
    ],
)
def test_more_sequences_than_run_at_once_are_told_by_their_field(fields: dict[str, Any], field: str | None) -> None:
    found = find_violations(request(**fields), PROMPT, LIMITS._replace(max_num_seqs=8))
    assert [violation.field for violation in found] == ([field] if field else [])
    assert all("at most 8" in violation.description for violation in found)


def test_a_number_of_sequences_out_of_its_range_is_told_once() -> None:
    found = find_violations(request(n=65), PROMPT, LIMITS._replace(max_num_seqs=8))
    assert [violation.field for violation in found] == ["n"]


def test_every_violation_is_told_and_the_model_first() -> None:
    found = violations(model="x", request_id="!", n=0, top_p=2.0, logit_bias={500: 200.0}, max_tokens=0, min_tokens=3)
    assert [violation.field for violation in found] == [
        "model",
        "request_id",
        "n",
        "sampling.top_p",
        "stop.max_tokens",
        "sampling.logit_bias",
        "sampling.logit_bias",
        "stop.min_tokens",
    ]


def test_many_wrong_ids_are_not_all_told() -> None:
    (violation,) = violations(stop_token_ids=tuple(range(100, 10_000)))
    assert len(violation.description) < 200


@given(st.floats(width=32, allow_nan=False))
def test_a_float_of_the_wire_is_itself(value: float) -> None:
    assert as_float32(value) == value


def submitted(
    prompt_token_ids: tuple[int, ...] = PROMPT,
    defaults: dict[str, float] | None = None,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **fields: Any,
) -> Any:
    return complete(
        request(**fields),
        prompt_token_ids,
        LIMITS,
        generation_defaults=defaults or {},
        gateway_seed=0,
        bad_word_ids=bad_word_ids,
    )


def test_a_silent_request_takes_the_neutral_values() -> None:
    submission = submitted()
    assert replace(submission.sampling, seed=None) == SamplingParams(1.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0)
    assert (submission.n, submission.max_tokens, submission.min_tokens) == (1, 28, 0)
    assert tuple(submission.prompt_token_ids) == PROMPT
    assert submission.stop_token_ids == (0, 3)


def test_the_models_defaults_go_before_the_neutral_and_behind_the_requests() -> None:
    sampling = submitted(defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20}, top_p=0.5).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 20, 0.0)


def test_zero_is_a_value_and_not_silence() -> None:
    sampling = submitted(defaults={"temperature": 0.6, "top_k": 20}, temperature=0.0, top_k=0).sampling
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)


def test_bad_words_become_token_sequences() -> None:
    sampling = submitted(bad_words=("a",), bad_token_sequences=((1, 2), (3,)), bad_word_ids=((4,), (3,))).sampling
    assert sampling.bad_token_sequences == ((1, 2), (3,), (4,))
    assert sampling.bad_words == ()


def test_an_id_is_allowed_once() -> None:
    assert submitted(allowed_token_ids=(5, 3, 5, 5, 3, 9)).sampling.allowed_token_ids == (5, 3, 9)


def test_what_travels_unread_is_kept() -> None:
    fields = {"allowed_token_ids": (5,), "logprobs": 3, "prompt_logprobs": 0, "logit_bias": {1: 2.0}}
    sampling = submitted(**fields).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    beams = BeamSearch(3, 0.5, EarlyStopping.FIRST)
    times = {"max_queue_seconds": 2.0, "remaining_seconds": 9.0}
    submission = submitted(tenant="t", priority=-2, beam_search=beams, **times)
    assert (submission.tenant, submission.priority, submission.beam_search) == ("t", -2, beams)
    assert (submission.max_queue_seconds, submission.remaining_seconds) == (2.0, 9.0)


def test_stop_tokens_are_the_models_and_the_requests() -> None:
    assert submitted(stop_token_ids=(9, 3)).stop_token_ids == (0, 3, 9)
    assert submitted(stop_token_ids=(9,), ignore_eos=True).stop_token_ids == (9,)


def test_the_seed_is_the_requests_or_derived_from_its_id() -> None:
    assert submitted(seed=0).sampling.seed == 0
    assert submitted(request_id="a").sampling.seed == derive_seed(0, "a")
    assert submitted(request_id="a", tenant="t").sampling.seed == derive_seed(0, "a", tenant="t") != derive_seed(0, "a")
    assert len({derive_seed(seed, request_id) for seed in (0, 1) for request_id in ("a", "b")}) == 4


def test_a_derived_seed_stays_what_it_is() -> None:
    # Another gateway, and another version, has to derive the same.
    expected = int.from_bytes(hashlib.sha256(b"7\0\0req-1").digest()[:8], "little")
    assert derive_seed(7, "req-1") == expected
    assert 0 <= expected < 2**64


def test_a_long_name_of_a_model_is_not_said_back() -> None:
    (found,) = violations(model="x" * 100_000)
    assert (found.field, found.reason, len(found.description) < 300) == ("model", Reason.MODEL_NOT_FOUND, True)
