"""Counts the rows of each tenant, and finds who has more than its share. Knows no sequences."""

from __future__ import annotations

from collections import Counter

FEW_TENANTS = 4
"""So many tenants may have to give up all that they run, if it is more than a share; where there are more, each keeps
its share, for else those that wait would take from those that run in turn."""


class TenantRows:
    """Counts rows by tenant. A tenant without rows is not counted among the tenants."""

    __slots__ = ("_max_rows", "_rows_of")

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows_of = Counter[str]()

    def add(self, tenant: str, change: int) -> None:
        """Adds rows to a tenant, or takes some away."""
        self._rows_of[tenant] += change
        if not self._rows_of[tenant]:
            del self._rows_of[tenant]

    def clear(self) -> None:
        """Takes all rows away."""
        self._rows_of.clear()

    def has_none(self, tenant: str) -> bool:
        """Whether a tenant has no row while others have some."""
        return bool(self._rows_of) and tenant not in self._rows_of

    @property
    def num_tenants(self) -> int:
        """Tenants that have rows."""
        return len(self._rows_of)

    @property
    def has_few_tenants(self) -> bool:
        """Whether so few have all the rows that waiting for their ends is starving, not queueing."""
        return len(self._rows_of) <= FEW_TENANTS

    @property
    def share(self) -> int:
        """Rows for each tenant if there were one more."""
        return max(self._max_rows // (len(self._rows_of) + 1), 1)

    @property
    def may_be_taken(self) -> bool:
        """Whether some tenant may have to give up some of its rows."""
        share = self.share
        return self.has_few_tenants or any(num_rows > share for num_rows in self._rows_of.values())

    def find_rich(self) -> list[str]:
        """Finds the tenants with more rows than a share."""
        return [tenant for tenant, num_excess in self.count_excess().items() if num_excess > 0]

    def count_excess(self) -> dict[str, int]:
        """Counts, by tenant, the rows beyond its share; negative where it has fewer."""
        share = self.share
        return {tenant: num_rows - share for tenant, num_rows in self._rows_of.items()}
