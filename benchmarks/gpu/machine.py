"""Stage `machine` of benchmarks/gpu_day.sh: what the machine is, and what it can do at best on random data."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.stage import Stage, start
from benchmarks.kit import processor

if TYPE_CHECKING:
    from collections.abc import Callable


def describe(stage: Stage) -> dict[str, object]:
    """Names what results depend on."""
    facts: dict[str, object] = {
        "is_dry": stage.is_dry,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "processor": processor.name(),
    }
    if stage.device.type == "cuda":
        properties = torch.cuda.get_device_properties(stage.device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "num_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nvidia_smi": output_of("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv"),
        }
    return facts


def output_of(*command: str) -> str:
    """What a command prints, or nothing where there is none such."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def version_of(package: str) -> str:
    """A package's version, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Describes the machine, then measures its ceilings one by one."""
    stage = start(__doc__)
    stage.keep("machine", describe(stage))
    ceilings: dict[str, float] = {}

    def measure(name: str, run: Callable[[], object], amount: float) -> None:
        ceilings[name] = amount / stage.seconds_of(run)
        stage.keep("ceilings", ceilings)

    source = torch.rand(2**20 if stage.is_dry else 2**28, device=stage.device)
    target = torch.empty_like(source)
    measure("bandwidth", lambda: target.copy_(source), 2 * source.nbytes)
    host = torch.empty(source.shape, pin_memory=stage.device.type == "cuda")
    measure("to_host", lambda: host.copy_(source), source.nbytes)
    measure("from_host", lambda: source.copy_(host), source.nbytes)
    size = 128 if stage.is_dry else 8192
    first, second = (torch.randn(size, size, device=stage.device) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float32):
        left, right = first.to(dtype), second.to(dtype)
        measure(name_of(dtype), lambda left=left, right=right: left @ right, 2 * size**3)
    multiply = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    left, right = ((each * 30).to(torch.int8) for each in (first, second))
    measure(name_of(left.dtype), lambda: multiply(left, right.T), 2 * size**3)


def name_of(dtype: torch.dtype) -> str:
    """What a ceiling of products is called."""
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
