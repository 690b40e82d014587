"""`python -m worker_service`."""

import gc
import os

from blockyard.service import grpc_environment

# Before gRPC is imported, as the next before torch is.
grpc_environment.prepare()

# Before torch loads its OpenMP runtime. Its threads wait for each other by spinning, for milliseconds unless told
# otherwise; where another process has taken a core, every parallel region then costs a time slice of the system's
# scheduler (measured: a step 8 times as long on two busy cores). 500 turns, some 50 µs, span the gaps inside a step.
os.environ.setdefault("GOMP_SPINCOUNT", "500")

# What the imports make stays as long as the process: to look through it again and again is a tenth of the start.
gc.disable()

from worker_service.server import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
