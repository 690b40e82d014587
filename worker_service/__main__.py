"""`python -m worker_service`."""

import os

# Before torch loads its OpenMP runtime. Its threads wait for each other by spinning, for milliseconds unless told
# otherwise; where another process has taken a core, every parallel region then costs a time slice of the system's
# scheduler (measured: a step 8 times as long on two busy cores). 500 turns, some 50 µs, span the gaps inside a step.
os.environ.setdefault("GOMP_SPINCOUNT", "500")

from worker_service.server import main

if __name__ == "__main__":
    main()
