"""Plays seeds until one fails or the time is over, and prints the last seed with its violations as JSON.

`python seeds.py FIRST STOP SECONDS`, in a process that has the product to be examined first on its path.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from tests.kit.simulation.__main__ import scenario_of
from tests.kit.simulation.play import play

# Thirty times what a scenario takes. A mistake may make a process busy for ever.
MAX_CALLBACKS = 400_000


def main() -> None:
    first, stop, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    logging.disable(logging.CRITICAL)
    end = time.monotonic() + seconds
    seed, violations = first, list[str]()
    for seed in range(first, stop):
        violations = play(scenario_of(seed), MAX_CALLBACKS).violations
        if violations or time.monotonic() > end:
            break
    print(json.dumps({"seed": seed, "violations": violations}))


if __name__ == "__main__":
    main()
