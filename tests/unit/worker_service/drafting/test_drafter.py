"""How many drafts are kept: the best by their chances and prices, by what each row has shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.drafting import DraftRows, Drafts
from worker_service.drafting.drafter import Drafter

if TYPE_CHECKING:
    from worker_service.drafting.drafter import Proposal


class Known:
    """A source that finds for each row as many drafts, behind as long a match, as it was told."""

    def __init__(self, *found: tuple[int, int]) -> None:
        self._found = np.array(found, np.int64)

    def find_drafts(self, wanted: DraftRows) -> Drafts:
        return Drafts(np.minimum(self._found[:, 0], wanted.most), self._found[:, 1])


def make_drafter(*found: tuple[int, int]) -> Drafter:
    drafter = Drafter(Known(*found))
    drafter.grow(4)
    return drafter


def propose(drafter: Drafter, num_rows: int, prices: list[int], most: int = 6) -> Proposal | None:
    rows = np.arange(num_rows)
    table = np.zeros((4, 64), np.int32)
    wanted = DraftRows(table, rows, np.full(num_rows, 9), np.full(num_rows, most), [None] * num_rows, 100)
    return drafter.propose(wanted, (), np.array(prices, np.int64))


def counts(proposal: Proposal | None, num_rows: int) -> list[int]:
    """The number of drafts of each row."""
    found = [0] * num_rows
    if proposal is not None:
        for row, count in zip(proposal.rows.tolist(), proposal.num_drafts.tolist(), strict=True):
            found[row] = count
    return found


def test_without_prices_all_drafts_are_kept() -> None:
    assert counts(propose(make_drafter((6, 2), (3, 20), (0, 0)), 3, []), 3) == [6, 3, 0]


def test_no_row_gets_more_than_it_may() -> None:
    assert counts(propose(make_drafter((6, 20), (6, 20)), 2, [0] * 8, most=4), 2) == [4, 4]


def test_no_more_are_kept_than_there_are_prices() -> None:
    assert sum(counts(propose(make_drafter((6, 20), (6, 20)), 2, [0] * 5), 2)) == 5


def test_the_likelier_drafts_come_first() -> None:
    assert counts(propose(make_drafter((6, 2), (6, 20)), 2, [600] * 12), 2) == [0, 6]
    assert counts(propose(make_drafter((6, 2), (6, 4)), 2, [500] * 12), 2) == [0, 1]


def test_a_price_above_all_chances_keeps_nothing() -> None:
    assert propose(make_drafter((6, 20), (6, 20)), 2, [1000] * 12) is None


def test_drafts_pay_together_where_the_first_alone_does_not() -> None:
    """A tile of rows costs its most at its first row."""
    drafter = make_drafter((6, 20))
    assert counts(propose(drafter, 1, [1500, 0, 0, 0, 0, 0]), 1) == [6]
    assert propose(drafter, 1, [1500]) is None


def test_a_row_learns_what_its_drafts_are_worth() -> None:
    drafter = make_drafter((4, 20), (4, 20))
    prices = [500] * 8
    for _ in range(30):
        proposal = propose(drafter, 2, prices)
        assert proposal is not None
        drafter.learn(proposal, np.array([0, 4])[proposal.rows])
        if len(proposal.rows) == 1:
            break
    assert counts(proposal, 2) == [0, 4]
    drafter.begin(0)
    assert counts(propose(drafter, 2, prices), 2) == [4, 4]


def test_drafts_behind_the_first_wrong_one_count_for_nothing() -> None:
    once, often = make_drafter((4, 20)), make_drafter((4, 20))
    for drafter, num_right in ((once, -1), (often, 0)):
        proposal = propose(drafter, 1, [])
        assert proposal is not None
        for _ in range(20):
            drafter.learn(proposal, np.array([num_right]))
    # A run that is computed again has shown nothing; of the other only the first drafts were seen to be wrong.
    assert counts(propose(once, 1, [800] * 4), 1) == [4]
    assert propose(often, 1, [800] * 4) is None
    assert counts(propose(often, 1, [600, 0, 0, 0]), 1) == counts(propose(once, 1, [600, 0, 0, 0]), 1) == [4]


def test_all_ranks_decide_the_same() -> None:
    first, second = make_drafter((6, 3), (5, 9)), make_drafter((6, 3), (5, 9))
    generator = np.random.default_rng(1)
    for _ in range(50):
        prices = generator.integers(0, 900, 11).tolist()
        proposals = [propose(drafter, 2, prices) for drafter in (first, second)]
        assert counts(proposals[0], 2) == counts(proposals[1], 2)
        if proposals[0] is not None:
            num_right = generator.integers(0, proposals[0].num_drafts + 1)
            for drafter, proposal in zip((first, second), proposals, strict=True):
                assert proposal is not None
                drafter.learn(proposal, num_right)
