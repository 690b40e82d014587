"""Prints the devices and their kernels as JSON: `python -m worker_service.self_check [cpu_kernels]`.

`blockyard doctor` runs it. Kernels are chosen as in a worker, which includes their self-test. Owns no state.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from blockyard_kernels.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def _devices() -> Iterator[torch.device]:
    yield torch.device("cpu")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield torch.device("cuda", index)


def _try(device: torch.device, kernels: str) -> dict[str, Any]:
    heard = _Warnings()
    logging.getLogger("blockyard_kernels").addHandler(heard)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    try:
        backend = get_backend(device, torch.bfloat16, kernels if device.type == "cpu" else "auto")
    except (ValueError, OSError, RuntimeError) as error:
        return {"device": str(device), "name": name, "kernels": "", "warnings": [str(error)]}
    finally:
        logging.getLogger("blockyard_kernels").removeHandler(heard)
    return {"device": str(device), "name": name, "kernels": backend.name, "warnings": heard.sentences}


def main(arguments: list[str]) -> None:
    kernels = arguments[0] if arguments else "auto"
    found = {
        "torch": torch.__version__,
        "triton": find_spec("triton") is not None,
        "devices": [_try(device, kernels) for device in _devices()],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
