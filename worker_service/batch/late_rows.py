"""Rows of steps that are launched, whose tokens are not known yet. Knows no steps, and owns no rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kernels.sampling import Flags
    from worker_service.batch.row_requests import RowRequests
    from worker_service.step import Array

# In the place of a token that a launched step samples in row r stands UNKNOWN - r until the step is finished.
UNKNOWN = -1


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    """The rows [R] that a launched step samples.

    `owners` counts the sequences that each row had had, `places` are the places of their tokens.
    """

    requests: RowRequests
    owners: Array
    places: Array

    def settle(
        self,
        all_token_ids: npt.NDArray[np.int32],
        ended: Flags,
        owners_now: Array,
        token_ids: Array,
        failed: Flags,
    ) -> Flags:
        """Writes the tokens and ends of rows; a row may have another owner by now, or none.

        Args:
            all_token_ids: [rows, places], of all rows; written.
            ended: of all rows; written.
            owners_now: of all rows.
            token_ids: [R], what the step has sampled.
            failed: [R], the rows that it sampled nothing for.

        Returns:
            [R], the rows that had ended before: what was computed of them does not count.
        """
        rows = self.requests.rows
        is_here = owners_now[rows] == self.owners
        had_ended = is_here & ended[rows]
        live = is_here & ~had_ended
        all_token_ids[rows[live], self.places[live]] = token_ids[live]
        ended[rows[live]] = (failed | self.requests.are_stops(token_ids, self.places))[live]
        return had_ended
