"""The three services with `--quantization int8` where it cannot be: a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import LLM
from blockyard.local.supervisor import StartError

SMALL: dict[str, Any] = {"num_device_blocks": 60, "num_host_blocks": 0, "num_threads": 1, "quantization": "int8"}


def test_a_dtype_that_lacks_it_is_refused() -> None:
    with pytest.raises(StartError, match=r"int8 needs the kernels for x86-64.*this is float16 on cpu"):
        LLM(**SMALL, dtype="float16")
