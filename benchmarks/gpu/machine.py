"""Stage `machine` of benchmarks/gpu_day.sh: what the machine is, and what it can do at best on random data."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.stage import Stage, start
from benchmarks.kit import processor


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
    source = torch.rand(2**20 if stage.is_dry else 2**28, device=stage.device)
    target = torch.empty_like(source)
    seconds = stage.seconds_of(lambda: target.copy_(source))
    ceilings["bandwidth"] = 2 * source.nbytes / seconds
    stage.keep("ceilings", ceilings)
    size = 128 if stage.is_dry else 8192
    for dtype in (torch.bfloat16, torch.float32):
        first, second = (torch.randn(size, size, device=stage.device).to(dtype) for _ in range(2))
        seconds = stage.seconds_of(lambda first=first, second=second: first @ second)
        ceilings[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
        stage.keep("ceilings", ceilings)


if __name__ == "__main__":
    main()
