"""`python -m tests.kit.kernels.late_worker`: a worker whose device comes to its results as late as it may, and swaps.

`LATE_DEPTH` says how many steps may be launched, 2 if it is not set.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

DEPTH_VARIABLE = "LATE_DEPTH"


def make_backends_late() -> None:
    """Has each model that is loaded get a backend that is late, and each cache streams for its swaps."""
    # Before torch is imported the worker's program sets what it reads then.
    import worker_service.__main__  # noqa: F401
    from tests.kit.kernels.late import make_late
    from tests.kit.kernels.late_streams import lazy_swaps
    from worker_service import set_up
    from worker_service.cache_engine import CacheEngine
    from worker_service.models import loader

    get_backend = loader.get_backend

    def get_late_backend(*arguments: Any, **options: Any) -> object:
        backend = get_backend(*arguments, **options)
        make_late(backend, int(os.environ.get(DEPTH_VARIABLE, "2")))
        return backend

    class LateCache(CacheEngine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.swap_on(lazy_swaps())

    loader.get_backend = get_late_backend  # type: ignore[assignment]
    set_up.CacheEngine = LateCache


if __name__ == "__main__":
    make_backends_late()
    runpy.run_module("worker_service", run_name="__main__", alter_sys=True)
