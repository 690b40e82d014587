"""Both fronts say the same: the same reason and field for what they refuse, the same answer for what they do not."""

from __future__ import annotations

import grpc
import pytest

from blockyard.errors import TABLE, Reason
from gateway import validation
from tests.unit.gateway.fronts.parity import scenarios
from tests.unit.gateway.fronts.parity.asking import spec_of
from tests.unit.gateway.fronts.parity.case import COMMON, Case
from tests.unit.gateway.fronts.parity.cases import BASES, CASES, FEATURES, RULES
from tests.unit.gateway.fronts.parity.conftest import MODULES, Results, sites_of
from tests.unit.gateway.fronts.parity.fronts import FRONTS, Answer, Front, Outcome, Refusal

by_name = pytest.mark.parametrize
FRONT_NAMES = [front.name for front in FRONTS]
# Functions whose rules are of one front alone: what has no form in the other, or is of its own calls.
NOT_COMMON = {
    "decode_generation": "which call takes which prompt; over HTTP a body has no other",
    "decode_chat": "the same",
    "decode_tokenize": "a text beside a conversation; over HTTP these are bodies of two kinds",
    "decode_resume": "positions; over HTTP they are the ids of events",
    "decode_score": "a query that is missing; over HTTP it is a field of the body",
}


def fields_of(refusal: Refusal) -> list[tuple[str, Reason]]:
    return [(violation.field, violation.reason) for violation in refusal.violations]


def check_status(refusal: Refusal, front: Front) -> None:
    rule = TABLE[refusal.reason]
    assert refusal.status == (rule.code if front.wire == "grpc" else rule.http_status)


@by_name("case", RULES, ids=lambda case: case.name)
def test_a_rule_is_told_with_the_same_reason_and_field(results: Results, case: Case) -> None:
    for front in filter(case.concerns, FRONTS):
        refusal, added = results.ran[case.name, front]
        assert isinstance(refusal, Refusal), (front, refusal)
        assert added is None
        assert sorted(fields_of(refusal)) == [(field, case.reason) for field in case.fields(front)], front
        assert refusal.reason is case.reason
        check_status(refusal, front)


@by_name("case", FEATURES, ids=lambda case: case.name)
def test_a_feature_gives_the_same_answer_and_asks_the_same_of_the_scheduler(results: Results, case: Case) -> None:
    for family in ("text", "chat"):
        fronts = [front for front in FRONTS if front.family == family and case.concerns(front)]
        told = [results.ran[case.name, front] for front in fronts]
        for front, (outcome, added) in zip(fronts, told, strict=True):
            assert isinstance(outcome, Answer), (front, outcome)
            assert added is not None
            assert added == told[0].added, front
            assert outcome == told[0].outcome, front


@by_name("case", FEATURES, ids=lambda case: case.name)
def test_a_feature_does_something(results: Results, case: Case) -> None:
    for front in filter(case.concerns, FRONTS):
        with_it, without = results.ran[case.name, front], results.ran[BASES.name, front]
        assert (with_it != without) == case.has_effect, front


def test_what_one_wire_cannot_say_it_truly_cannot() -> None:
    for case in CASES:
        assert bool(case.only) == bool(case.why)
        if case.only == "http":
            with pytest.raises((ValueError, TypeError, AttributeError)):
                spec_of({**COMMON, **case.asked})


def check_failure(outcome: Outcome, reason: Reason, front: Front, *, in_stream: bool, retries: bool = True) -> None:
    assert isinstance(outcome, Refusal)
    assert (outcome.reason, outcome.message, outcome.violations) == (reason, "so it is", ())
    if in_stream and front.wire == "http":
        assert outcome.status is None
        return
    check_status(outcome, front)
    expected = scenarios.RETRY_SECONDS if retries else None
    assert outcome.retry_after_seconds == pytest.approx(expected)


@by_name("reason", Reason)
def test_an_error_of_the_scheduler_is_told_as_it_is(results: Results, reason: Reason) -> None:
    for front in FRONTS:
        check_failure(results.refused[reason, front], reason, front, in_stream=False)
        check_failure(results.failed[reason][front], reason, front, in_stream=front.streams)


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_a_sequence_that_fails_says_why_beside_its_neighbour(results: Results, front: Front) -> None:
    told = results.failed_alone[(1,), front]
    assert isinstance(told, Answer)
    good, bad = told.choices
    assert (good.finish_reason, good.error) == ("length", None)
    assert (bad.finish_reason, bad.error) == ("error", (Reason.NOT_FINITE, "so it is"))
    assert bad.token_ids == good.token_ids[:2] or not good.token_ids


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_a_call_of_which_every_sequence_fails_fails(results: Results, front: Front) -> None:
    check_failure(results.failed_alone[(0, 1), front], Reason.NOT_FINITE, front, in_stream=front.streams, retries=False)


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_a_request_that_is_cancelled_says_so(results: Results, front: Front) -> None:
    told = results.cancelled[front]
    assert isinstance(told, Refusal)
    assert told.reason is Reason.CLIENT_CANCELLED
    assert told.status in (grpc.StatusCode.CANCELLED, 499, None)


def test_a_request_ends_when_its_client_leaves(results: Results) -> None:
    assert results.left == set(FRONT_NAMES)


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_a_request_that_is_sent_again_is_the_same_one(results: Results, front: Front) -> None:
    first, second, num_added = results.sent_again[front]
    assert isinstance(first, Answer)
    assert first == second
    assert num_added == 1


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_another_request_of_the_same_name_is_refused(results: Results, front: Front) -> None:
    told = results.in_conflict[front]
    assert isinstance(told, Refusal)
    assert told.reason is Reason.REQUEST_ID_CONFLICT
    check_status(told, front)


@by_name("front", FRONTS, ids=FRONT_NAMES)
def test_an_answer_is_read_again(results: Results, front: Front) -> None:
    first, again = results.resumed[front]
    assert isinstance(first, Answer)
    assert isinstance(again, Answer)
    assert again.choices[0].text == first.choices[0].text
    assert again.choices[0].finish_reason == first.choices[0].finish_reason


def test_every_rule_has_a_case(results: Results) -> None:
    told = {site for site, _ in results.told}
    for module in MODULES:
        for site, node in sites_of(module).items():
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            was_told = any(
                (each.module, each.function) == (site.module, site.function) and each.line in lines for each in told
            )
            assert was_told or site.function in NOT_COMMON, site
    assert NOT_COMMON.keys() <= {site.function for module in MODULES for site in sites_of(module)}


def test_every_range_has_a_case(results: Results) -> None:
    told = {name for site, name in results.told if (site.module, site.function) == (validation.__name__, "violations")}
    assert told == {rule.field for rule in validation.RULES}
