"""The smallest form of `tests.kit.oracles.interpreted_oracle`: a whole worker on the GPU backend, with adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernels.triton_interpreter import IS_INTERPRETED
from tests.kit.oracles.device_oracle import OracleWorker, Way, make_requests
from worker_service.models import loader

from blockyard_kernels.cuda import backend, graphs  # isort: skip
from blockyard_kernels.cuda.linear import CudaLinear, Method  # isort: skip
from blockyard_kernels.cuda.linear import Way as ProductWay  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from scheduler_service.core.values import GroupSpec


def settle(linears: Iterable[CudaLinear]) -> bool:
    """What the probe comes to; see test_linear.py. To interpret it takes a minute."""
    for linear in linears:
        linear.way = ProductWay(Method.TILED)
    return True


def make_specs(worker: OracleWorker) -> list[GroupSpec]:
    """Two, whose adapters share the slot."""
    specs = make_requests(worker.vocab_size, 3, 2, worker.loras)[1:]
    return [replace(spec, prompt_token_ids=spec.prompt_token_ids[:5]) for spec in specs]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(not IS_INTERPRETED, reason="on a GPU tests/gpu/test_oracle.py runs all ways")
async def test_any_way_gives_the_tokens_of_running_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.kit.oracles.interpreted_oracle import compare

    monkeypatch.setattr(graphs, "TOKEN_MULTIPLE", 8)
    monkeypatch.setattr(backend, "settle", settle)
    # What is put in its place there is gone with this test.
    monkeypatch.setattr(loader, "get_backend", loader.get_backend)
    assert await compare(make_specs, tmp_path, names="ab", ways=[Way("kill", kill_after=2)])
