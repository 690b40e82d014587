"""The device of these tests: a GPU, unless BLOCKYARD_TEST_DEVICE says otherwise. On `cpu` they show that they work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard_kernels.ops import Backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine threads of small products wait too long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(os.environ.get("BLOCKYARD_TEST_DEVICE", "cuda"))


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def backend(device: torch.device) -> Backend:
    return get_backend(device, torch.float32, "reference")
