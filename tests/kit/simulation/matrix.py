"""Writes docs/reliability/matrix.md: which faults met what in a run of many scenarios, and what was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.processes.system import ROOT
from tests.kit.simulation.health import Judgement

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


HEALTH = """
## Health

Every half second each gateway and the scheduler were asked whether they were ready, and the simulation compared the \
answer with the truth: whether the service, the scheduler and the workers of a replica ran and could reach each other. \
A peer that is frozen or cut off without a word is noticed after some seconds, and what comes back has to be set up. \
In some scenarios steps take up to eight seconds, as with long prompts. An answer is wrong if it was given for 12 s \
(ready) or 15 s (not ready) while the opposite was true.
"""


def write_matrix(
    outcomes: Counter[str],
    strikes: Counter[Strike],
    health: Counter[tuple[str, Judgement]],
    num_scenarios: int,
    num_failed: int,
) -> None:
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
    lines += [HEALTH, "| service | " + " | ".join(Judgement) + " |", "|---" * (1 + len(Judgement)) + "|"]
    for role in sorted({role for role, _ in health}):
        lines.append(f"| {role} | " + " | ".join(f"{health[role, each]:,}" for each in Judgement) + " |")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
