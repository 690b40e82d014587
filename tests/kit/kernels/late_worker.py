"""`python -m tests.kit.kernels.late_worker`: a worker whose device comes to its results as late as it may.

`LATE_DEPTH` says how many steps may be launched.
"""

import os

from worker_service.__main__ import main


def make_backends_late() -> None:
    """Has each model that is loaded get a backend that is late."""
    # Behind what the worker's program sets before torch is imported.
    from tests.kit.kernels.late import make_late
    from worker_service.models import loader

    get_backend = loader.get_backend

    def get_late_backend(*arguments: object) -> object:
        backend = get_backend(*arguments)  # type: ignore[arg-type]
        make_late(backend, int(os.environ.get("LATE_DEPTH", "2")))
        return backend

    loader.get_backend = get_late_backend  # type: ignore[assignment]


if __name__ == "__main__":
    make_backends_late()
    main()
