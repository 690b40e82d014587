"""Checks torch, the kernels and their self-test in a process of the worker's; imports none of them itself."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from blockyard.cli.doctor.findings import bad, doubtful, good
from blockyard.extras import PACKAGES
from blockyard.local.supervisor import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.cli.doctor.findings import Finding
    from blockyard.configuration import WorkerProcessSettings

MODULE = "worker_service.self_check"
SECONDS = 120.0
REFERENCE = "reference"


async def look_at_kernels(settings: WorkerProcessSettings) -> list[Finding]:
    """Runs the self-check process and returns its findings."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE, settings.cpu_kernels),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        return [bad("kernels", f"no answer in {SECONDS:.0f} s", f"run python -m {MODULE} to see why")]
    if process.returncode:
        last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        packages = ", ".join(PACKAGES["worker"])
        return [bad("worker", last, f"install blockyard[worker] ({packages}), or run python -m {MODULE} to see more")]
    return list(read_answer(json.loads(out)))


def read_answer(answer: dict[str, Any]) -> Iterator[Finding]:
    yield good("torch", answer["torch"])
    for device in answer["devices"]:
        subject, text = f"kernels on {device['device']}", f"{device['kernels'] or 'none'} ({device['name']})"
        told = "; ".join(device["warnings"])
        if not device["kernels"]:
            yield bad(subject, told, "build them with make setup, or choose other --cpu-kernels")
        elif device["kernels"] == REFERENCE:
            advice = "run make setup, which needs a C++ compiler" if device["device"] == "cpu" else "pip install triton"
            yield doubtful(subject, f"{text}, which are slower: {told}", advice)
        elif told:
            yield doubtful(subject, f"{text}: {told}", "results are right, and may differ from other machines'")
        else:
            yield good(subject, f"{text}, self-test passed")
