"""A replica of two workers behind the real scheduler and gateway: `tests.kit.chaos.rank_failures` in short.

Whatever happens to a rank, no stream loses a token, and a rank that is well does not load again.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from blockyard.service.faults import Action
from tests.kit.chaos.rank_failures import RANKS, Failure, running
from tests.kit.chaos.rank_faults import CUT, FREEZE

if TYPE_CHECKING:
    from pathlib import Path


async def test_streams_outlive_whatever_happens_to_ranks(tmp_path: Path) -> None:
    async with running(tmp_path) as failures:
        # These two are killed in the middle of a step before.
        await failures.meet(Failure("rank-1", "decode", Action.KILL))
        await failures.meet(Failure("rank-0", "prefill", Action.HANG))
        await failures.signal_idle(["rank-1"], signal.SIGKILL)
        await failures.signal(["rank-0"], CUT)
        await failures.signal(RANKS, FREEZE)
        await failures.differ("rank-1")
        await failures.hand_over()
