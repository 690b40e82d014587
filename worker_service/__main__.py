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

# Imported objects stay as long as the process: collecting among them again and again takes a tenth of the start.
gc.disable()

from blockyard.settings import load  # noqa: E402
from worker_service.config import WorkerConfiguration  # noqa: E402


def main() -> None:
    """The program: one worker, or the parent of several."""
    description = "Holds the weights and the KV cache of one device, or of several by a child process for each."
    configuration = load(WorkerConfiguration, "worker_service", description)
    # Only the needed module is imported: the parent of several workers needs no torch, whose import is slow.
    if configuration.worker.num_workers > 1:
        from worker_service.processes import run  # noqa: PLC0415
    else:
        from worker_service.server import run  # noqa: PLC0415
    gc.freeze()
    gc.enable()
    run(configuration)


if __name__ == "__main__":
    main()
