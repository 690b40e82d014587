"""The settings of speculation. Read by the scheduler, which passes its limits on to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from blockyard.settings import option

if TYPE_CHECKING:
    from blockyard.contract.parallel import ParallelSizes


class DraftLimits(NamedTuple):
    """The most tokens that one sequence and all sequences draft in a step; 0: none."""

    max_draft_tokens: int
    max_draft_rows: int


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Whether workers draft tokens, which means to guess them and to compute several in one step."""

    speculation: Literal["none", "ngram", "auto"] = option(
        "none",
        "draft tokens that repeat earlier ones, which changes no answer; auto: as many as make it faster, ngram: as "
        "many as are allowed",
        choices=("none", "ngram", "auto"),
    )
    max_draft_tokens: Annotated[int, Field(ge=1, le=1024)] = option(
        11, "tokens that --speculation drafts for one sequence in a step at most"
    )
    max_draft_rows: Annotated[int, Field(ge=1, le=1024)] = option(
        32, "tokens that --speculation drafts for all sequences in a step at most"
    )

    def find_limits(self, sizes: ParallelSizes, num_state_blocks: int = 0) -> DraftLimits:
        """Returns the limits for replicas of these sizes: with pipeline stages nothing is drafted.

        Nor is anything with `num_state_blocks` of each sequence, since wrong drafts would change its state.
        """
        if self.speculation == "none" or sizes.pipeline_parallel_size > 1 or num_state_blocks:
            return DraftLimits(0, 0)
        return DraftLimits(min(self.max_draft_tokens, self.max_draft_rows), self.max_draft_rows)
