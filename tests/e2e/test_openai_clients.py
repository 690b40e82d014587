"""The OpenAI API on the real services, by clients and tools of others, each in an environment of its own.

Needs packages from the network.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.kit.environments import Environment
from tests.kit.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

DEMO = ROOT / "models" / "demo"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "50", "--debug-integrity"]
FEATURES = ROOT / "tests" / "e2e" / "openai_features.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("openai"), FLAGS) as system:
        yield system


def environment(factory: pytest.TempPathFactory, package: str) -> Environment:
    return Environment.with_packages(factory.mktemp(package) / "environment", package)


@pytest.mark.parametrize("package", ["openai", "litellm"])
def test_a_client_drives_every_feature(demo: System, tmp_path_factory: pytest.TempPathFactory, package: str) -> None:
    program = environment(tmp_path_factory, package)
    told = json.loads(program.run("python", str(FEATURES), package, demo.http_url).splitlines()[-1])
    assert told.pop("version")
    assert {name: what for name, what in told.items() if what != "ok"} == {}
    assert len(told) > 10


def test_the_example_runs(demo: System, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = environment(tmp_path_factory, "openai")
    told = program.run("python", str(ROOT / "examples" / "openai_client.py"), demo.http_url)
    assert "top_p: must be above 0" in told


def test_schemathesis_finds_nothing(demo: System, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All that it can think of is answered as the document says, and nothing with an error of the server's."""
    program = environment(tmp_path_factory, "schemathesis")
    told = program.run(
        "schemathesis",
        "run",
        f"{demo.http_url}/openapi.json",
        "--checks=all",
        # What the document cannot say: a token id beyond the vocabulary, a min_tokens above max_tokens.
        "--exclude-checks=positive_data_acceptance",
        "--max-examples=100",
        "--seed=1",
        "--request-timeout=60",
        "--suppress-health-check=all",
        seconds=800,
    )
    assert "No issues found" in told


def test_guidellm_completes_a_load(demo: System, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = environment(tmp_path_factory, "guidellm")
    report = program.folder / "report.json"
    program.run(
        "guidellm",
        "benchmark",
        f"--target={demo.http_url}",
        f"--processor={DEMO}",
        "--rate-type=concurrent",
        "--rate=4",
        "--max-requests=40",
        "--data=prompt_tokens=64,output_tokens=16",
        f"--output-path={report}",
        seconds=400,
    )
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    assert re.search(r'"errored": \[\]', json.dumps(benchmark["requests"]))
