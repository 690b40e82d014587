"""The share of the rows that each tenant may have where several have requests. Knows no sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FEW_TENANTS = 4
"""Up to this many tenants may have to give up all that they run, if it is more than a share. With more tenants each
keeps its share: otherwise those that wait would take from those that run, in turn and for ever."""


class TenantShares:
    """Compares the rows of each tenant with its share. `rows_of_tenant` has no tenant without rows, and may change."""

    __slots__ = ("_max_rows", "_rows_of_tenant")

    def __init__(self, rows_of_tenant: Mapping[str, int], max_rows: int) -> None:
        self._rows_of_tenant = rows_of_tenant
        self._max_rows = max_rows

    @property
    def num_tenants(self) -> int:
        """Tenants that have rows."""
        return len(self._rows_of_tenant)

    @property
    def has_few_tenants(self) -> bool:
        """Whether so few tenants have all the rows that others would starve rather than queue."""
        return len(self._rows_of_tenant) <= FEW_TENANTS

    @property
    def share(self) -> int:
        """Rows for each tenant if one more had some."""
        return max(self._max_rows // (len(self._rows_of_tenant) + 1), 1)

    @property
    def may_be_taken(self) -> bool:
        """Whether some tenant may have to give up some of its rows."""
        share = self.share
        return self.has_few_tenants or any(num_rows > share for num_rows in self._rows_of_tenant.values())

    def find_over_share(self) -> list[str]:
        return [tenant for tenant, num_excess in self.count_excess().items() if num_excess > 0]

    def count_excess(self) -> dict[str, int]:
        """Returns for each tenant its rows beyond a share; negative if it has fewer."""
        share = self.share
        return {tenant: num_rows - share for tenant, num_rows in self._rows_of_tenant.items()}
