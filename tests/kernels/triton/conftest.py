"""Triton's kernels: in its interpreter, or on a GPU (BLOCKYARD_TEST_DEVICE=cuda), as tests of that tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.kernels.triton_interpreter import IS_INTERPRETED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_INTERPRETED:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.gpu)
