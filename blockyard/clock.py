"""Time and chance, which a process takes from one `Clock`, so that a run can be repeated where that is replaced."""

from __future__ import annotations

import random as system_random
import time as system_time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Clock:
    """The clocks and the random numbers of a process; by default the system's.

    Attributes:
        monotonic: returns seconds since some instant; the event loop's time.
        perf_counter: returns seconds for measurements, which are compared with each other alone.
        time: returns seconds since 1970.
        random: draws numbers. The system's cannot be guessed.
    """

    monotonic: Callable[[], float] = system_time.monotonic
    perf_counter: Callable[[], float] = system_time.perf_counter
    time: Callable[[], float] = system_time.time
    random: system_random.Random = field(default_factory=system_random.SystemRandom)

    def token_bytes(self, num_bytes: int) -> bytes:
        """Draws a key."""
        return self.random.randbytes(num_bytes)

    def token_hex(self, num_bytes: int) -> str:
        """Draws a name of two hexadecimal digits for each byte."""
        return self.token_bytes(num_bytes).hex()

    def uuid_hex(self) -> str:
        """Draws a random UUID, and returns its 32 hexadecimal digits."""
        return uuid.UUID(bytes=self.token_bytes(16), version=4).hex


SYSTEM = Clock()
