"""What became of the cases of one run."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Generator

# Of one kind; the rest is counted.
MAX_TRACES = 3


class Report:
    """Counts outcomes, and keeps what nobody thought of: any error but a typed one, and BUG."""

    def __init__(self, name: str, num_cases: int, seed: int) -> None:
        self.name = name
        self.num_cases = num_cases
        self.rng = random.Random(f"{name} {seed}")
        self.outcomes = Counter[str]()
        self.surprises = Counter[str]()
        self.traces: list[str] = []
        # What else was measured, a line each.
        self.notes: list[str] = []

    @contextmanager
    def case(self, *, may_be_bug: bool = False) -> Generator[None]:
        """One message is taken: what it raises is its outcome. `may_be_bug`: it may be told so by the message."""
        try:
            yield
        except BlockyardError as error:
            if error.reason is Reason.BUG and not may_be_bug:
                self.surprise(error)
            self.outcomes[str(error.reason)] += 1
        except Exception as error:  # noqa: BLE001 - to find these is what this is for
            self.surprise(error)
        else:
            self.outcomes["taken"] += 1

    def surprise(self, error: BaseException) -> None:
        """Takes note of an error that should not have been."""
        self.surprises[f"{type(error).__name__}: {error}"[:100]] += 1
        if len(self.traces) < MAX_TRACES:
            self.traces.append("".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.outcomes.most_common(6))
        return f"{self.name}: {self.num_cases} cases: {told}; {sum(self.surprises.values())} surprises"
