"""A quiet tenant begins at once, whatever floods: a cut of `python -m tests.kit.oracles.fair_traces`."""

from __future__ import annotations

from tests.kit.oracles.fair_traces import run_traces


def test_a_quiet_tenant_has_its_first_token_within_four_steps_in_random_traces() -> None:
    num_probes, failures = run_traces(30)
    assert not failures, "\n".join(failures)
    assert num_probes > 300
