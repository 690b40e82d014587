"""Workers of which each rank computes the whole model: a stand-in until networks hold shares.

A step does one operation of the group, as the steps of such a network do many. As a program it is the worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from worker_service import worker
from worker_service.server import main
from worker_service.steps.rank_steps import RankSteps

if TYPE_CHECKING:
    from collections.abc import Callable


def compute_whole(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Has every worker of this process do so, from here on."""
    add_to_digest = RankSteps.on_inputs

    def on_inputs(ranks: RankSteps, *arguments: Any) -> None:
        group = ranks._group
        assert group is not None
        rows = torch.ones(1, 1)
        group.stage.add(rows)
        assert rows.item() == group.stage.size
        add_to_digest(ranks, *arguments)

    set_attribute(worker, "require_shares", lambda parallel: None)
    set_attribute(RankSteps, "on_inputs", on_inputs)


if __name__ == "__main__":
    compute_whole()
    main()
