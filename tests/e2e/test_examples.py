"""The examples in other languages: built from the protos, run at the real services, also over connections that break.

Needs packages from the network (npm), and those of the languages: see each example's head.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from blockyard import Client
from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.chaos.faulty_connection import Direction, EndAt, Ending, Rule
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DEMO = ROOT / "models" / "demo"
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("examples"), ["--num-device-blocks", "100"]) as system:
        yield system


def run(*line: str, cwd: Path) -> None:
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def build(language: str, folder: Path) -> list[str]:
    """Builds a copy of an example as its head says, and returns the command that runs it."""
    shutil.copytree(ROOT / "protos", folder / "protos")
    place = folder / "examples" / language
    made = shutil.ignore_patterns("build", "node_modules", "package-lock.json")
    shutil.copytree(ROOT / "examples" / language, place, ignore=made)
    if language == "cpp":
        run("cmake", "-B", "build", cwd=place)
        run("cmake", "--build", "build", cwd=place)
        return [str(place / "build" / "stream")]
    if language == "java":
        run("make", "build/Example.class", cwd=place)
        return ["make", "-s", "-C", str(place), "run"]
    run("npm", "install", "--no-audit", "--no-fund", cwd=place)
    return ["node", str(place / "index.js")]


@pytest.fixture(scope="module", params=["node", "java", "cpp"])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return build(request.param, tmp_path_factory.mktemp(request.param))


async def output_of(example: list[str], address: str) -> str:
    target = f"ADDRESS={address}" if example[0] == "make" else address
    process = await asyncio.create_subprocess_exec(
        *example, target, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode == 0, f"{output.decode()}\n{errors.decode()}"
    return output.decode()


def whole_answer(demo: System) -> str:
    with Client(demo.grpc_target) as client:
        return client.generate(PROMPT, max_tokens=40, temperature=0.0).text


async def test_a_text_streams(demo: System, example: list[str]) -> None:
    output = await output_of(example, demo.grpc_target)
    assert "demo: up to" in output
    assert PROMPT + await asyncio.to_thread(whole_answer, demo) in output
    assert "FINISH_REASON_STOP: 7 tokens in, 37 out" in output


async def test_a_connection_that_breaks_costs_nothing(demo: System, example: list[str]) -> None:
    """Its first connection ends in the middle of the answer; what is printed is the same.

    Not by a reset, which may discard the first event with the id of the request.
    """

    def rule_of(number: int) -> Rule:
        return Rule() if number else Rule(end_at=EndAt(Direction.DOWN, 560, Ending.CUT))

    async with FaultProxy(demo.grpc_target, rule_of=rule_of) as proxy:
        output = await output_of(example, proxy.address)
        assert sum(proxy.stats.num_endings.values()) == 1, str(proxy.stats)
    assert PROMPT + await asyncio.to_thread(whole_answer, demo) in output
