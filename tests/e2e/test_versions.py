"""Services of an earlier version run with those of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.versions.mixes import check_mixes
from tests.kit.versions.trees import unpack_commit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

# The oldest version whose services work with today's. A change of the wire that breaks one of the mixes sets this to
# its own commit, and the changelog says so.
OLDEST_COMMIT = "cc214ad3"


async def test_each_service_may_be_of_the_oldest_version(tmp_path: Path) -> None:
    await check_mixes(unpack_commit(OLDEST_COMMIT, tmp_path / "oldest"), tmp_path / "logs")
