"""Triton's kernels: in its interpreter, or on a GPU (BLOCKYARD_TEST_DEVICE=cuda), as tests of that tier."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kit.kernels.triton_interpreter import IS_INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_INTERPRETED:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def silent_numbers() -> Iterator[None]:
    """A GPU says nothing where a number leaves its range; numpy, which interprets, would warn."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered")
        yield
