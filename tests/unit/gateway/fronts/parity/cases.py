"""The one list of what both fronts have in common: each rule and each feature once, in the proto's own words.

What is missing here is found by `test_complete`, which looks at the code, the proto and the bodies of the OpenAI API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.gateway.fronts.parity.case import Case
from tests.unit.gateway.fronts.parity.features import FEATURES
from tests.unit.gateway.fronts.parity.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.gateway.fronts.parity.fronts import Front

CASES = [*RULES, *FEATURES]
BASES = Case("nothing beside", {})


def cases_of(front: Front) -> Iterator[Case]:
    """Those that a front is asked."""
    return (case for case in CASES if case.concerns(front))
