"""When to try again, and where."""

from __future__ import annotations

import pytest

from blockyard.client.retry import Attempts, Deadline, RetryPolicy, may_pass
from blockyard.client.targets import Targets, call_metadata
from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason


def unavailable(hint: float | None = None) -> BlockyardError:
    return BlockyardError(Reason.NO_READY_WORKER, "not yet", retry_after_seconds=hint)


@pytest.mark.parametrize(
    ("hint", "num_failures", "low", "high"),
    [
        (None, 1, 0.1, 0.125),
        (None, 3, 0.4, 0.5),
        (None, 10**6, 5.0, 6.25),
        (2.0, 1, 2.0, 2.5),
        (2.0, 9, 2.0, 2.5),
        (99.0, 1, 5.0, 6.25),
    ],
)
def test_delays(hint: float | None, num_failures: int, low: float, high: float) -> None:
    assert low <= RetryPolicy().delay_seconds(unavailable(hint), num_failures) <= high


@pytest.mark.parametrize("reason", list(Reason))
def test_only_what_is_unavailable_may_pass(reason: Reason) -> None:
    error = BlockyardError(reason, "", retry_after_seconds=0.0)
    assert may_pass(error) == (reason in ("DRAINING", "NO_READY_WORKER", "GROUP_BROKEN"))


def test_a_call_that_a_proxy_resets_may_pass() -> None:
    """A bug that a service reports may not: it has been answered."""
    assert may_pass(
        BlockyardError(Reason.BUG, "Received RST_STREAM with error code 2", metadata=dict(TRANSPORT_ORIGIN))
    )


def num_tries(attempts: Attempts, *, has_begun: bool = False) -> int:
    for number in range(1, 1000):
        try:
            attempts.delay_after(unavailable(), has_begun=has_begun)
        except BlockyardError:
            return number
    return 1000


@pytest.mark.parametrize("num_targets", [1, 3])
def test_tries_are_counted_over_all_gateways(num_targets: int) -> None:
    policy = RetryPolicy(max_attempts=4)
    assert num_tries(Attempts(policy, None, num_targets)) == 4 * num_targets
    attempts = Attempts(policy, None, num_targets)
    for _ in range(50):
        attempts.delay_after(unavailable())
        attempts.on_progress()


def test_the_next_gateway_is_tried_at_once() -> None:
    attempts = Attempts(RetryPolicy(), None, num_targets=2)
    delays = [attempts.delay_after(unavailable(1.0)) for _ in range(4)]
    assert delays[0] == delays[2] == 0.0
    assert delays[1] >= 1.0 <= delays[3]


def test_a_stream_that_has_begun_is_worth_more_patience() -> None:
    assert num_tries(Attempts(RetryPolicy(), None), has_begun=True) == 1000
    assert num_tries(Attempts(RetryPolicy(resume_seconds=0.0), None), has_begun=True) == 4


def test_a_deadline_ends_it() -> None:
    attempts = Attempts(RetryPolicy(max_delay_seconds=99.0), 60.0)
    assert attempts.delay_after(unavailable(9.0), has_begun=True) >= 9.0
    with pytest.raises(BlockyardError, match="not yet"):
        attempts.delay_after(unavailable(99.0), has_begun=True)


def test_deadlines() -> None:
    assert Deadline(None).remaining() is None
    assert Deadline(None).remaining(at_most=1.0) == 1.0
    assert Deadline(0.0).remaining(at_most=1.0) == 0.0
    assert not Deadline(1.0).allows(2.0)
    assert Deadline(None).allows(1e9)


@pytest.mark.parametrize("given", ["a:1, b:2,,a:1,", ["a:1", " b:2", "", "a:1"]])
def test_targets_are_left_in_turn(given: str | list[str]) -> None:
    targets = Targets(given)
    assert (list(targets), len(targets), str(targets)) == (["a:1", "b:2"], 2, "a:1,b:2")
    assert targets.current == "a:1"
    targets.on_failure("a:1")
    # Another call that failed at the same time.
    targets.on_failure("a:1")
    assert targets.current == "b:2"
    targets.on_failure("b:2")
    assert targets.current == "a:1"
    targets.prefer("b:2")
    assert targets.current == "b:2"


def test_a_target_in_a_list_is_taken_whole() -> None:
    assert list(Targets(["ipv4:127.0.0.1:1,127.0.0.1:2"])) == ["ipv4:127.0.0.1:1,127.0.0.1:2"]


@pytest.mark.parametrize("given", ["", " , ", [], [""]])
def test_a_client_without_a_target(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        Targets(given)


def test_a_tenant_goes_with_each_call() -> None:
    assert call_metadata("") == ()
    assert call_metadata("team-1") == (("x-blockyard-tenant", "team-1"),)


@pytest.mark.parametrize("tenant", ["a b", "é", "x" * 65, "a\n"])
def test_a_bad_tenant_is_refused_here(tenant: str) -> None:
    with pytest.raises(BlockyardError) as caught:
        call_metadata(tenant)
    assert [violation.field for violation in caught.value.violations] == ["tenant"]
