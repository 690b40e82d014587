"""Writes docs/reliability/matrix.md: which faults met what in a run of many scenarios, and what was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.processes.system import ROOT

if TYPE_CHECKING:
    from collections import Counter

    from tests.kit.simulation.clients import Strike

PAGE = ROOT / "docs" / "reliability" / "matrix.md"
PHASES = ("running", "waiting", "swapped", "idle", "no worker", "no scheduler")
HEAD = """# The fault matrix

How often each fault struck what, and what the system was doing at that instant, in one run of `make sim`. The page on \
[the simulation](simulation.md) says what the faults are. *Running*: sequences generate. *Waiting*: some wait for a \
place, too. *Swapped*: some are in the host's memory. *No worker*, *no scheduler*: none is ready, after an earlier \
fault or at the start.
"""


def write_matrix(outcomes: Counter[str], strikes: Counter[Strike], num_scenarios: int, num_failed: int) -> None:
    """Writes the page."""
    requests = ", ".join(f"{number:,} {name}" for name, number in outcomes.most_common())
    lines = [
        HEAD,
        f"{num_scenarios:,} scenarios with {strikes.total():,} faults; in {num_failed:,} of them a promise was broken.",
        "",
        f"What became of the requests: {requests}.",
        "",
        "| fault | strikes | " + " | ".join(PHASES) + " |",
        "|---|---" + "|---" * len(PHASES) + "|",
    ]
    for kind, role in sorted({(strike.kind, strike.role) for strike in strikes}):
        counts = [sum(n for s, n in strikes.items() if (s.kind, s.role, s.phase) == (kind, role, p)) for p in PHASES]
        lines.append(f"| {kind} | {role} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
