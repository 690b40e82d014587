"""The OpenAI API on the real services, by clients and tools of others, each in an environment of its own.

Needs packages from the network.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.processes.environments import Environment
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

DEMO = ROOT / "models" / "demo"
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "50", "--debug-integrity"]
FEATURES = ROOT / "tests" / "e2e" / "openai_features.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(DEMO, tmp_path_factory.mktemp("openai"), FLAGS) as system:
        yield system


# What each is installed with. litellm takes tools only where `mcp` is there; guidellm's options are those of 0.8.
PACKAGES = {
    "openai": ["openai"],
    "litellm": ["litellm", "mcp"],
    "schemathesis": ["schemathesis>=4"],
    "guidellm": ["guidellm>=0.8"],
    "langchain": ["langchain-openai"],
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Makes the environment of a client, once."""

    @functools.cache
    def make(name: str) -> Environment:
        return Environment.with_packages(tmp_path_factory.mktemp(name) / "environment", *PACKAGES[name])

    return make


@pytest.mark.parametrize("package", ["openai", "litellm"])
def test_a_client_drives_every_feature(demo: System, environment: Callable[[str], Environment], package: str) -> None:
    # litellm asks the network for prices otherwise, and writes that it got none.
    output = environment(package).run(
        "python", str(FEATURES), package, demo.http_url, LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    told = json.loads(output.splitlines()[-1])
    assert told.pop("version")
    assert {name: what for name, what in told.items() if what != "ok"} == {}
    assert len(told) > 10


def test_the_example_runs(demo: System, environment: Callable[[str], Environment]) -> None:
    told = environment("openai").run("python", str(ROOT / "examples" / "openai_client.py"), demo.http_url)
    assert "top_p: must be above 0" in told


LANGCHAIN = """
import sys
from typing import Literal
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

def make_chat(max_tokens):
    url = f"{sys.argv[1]}/v1"
    return ChatOpenAI(base_url=url, api_key="none", model="demo", max_retries=0, max_tokens=max_tokens)
chat = make_chat(4)
assert chat.invoke("Hi").content
assert "".join(piece.content for piece in chat.stream("Hi"))
assert len(chat.batch(["Hi", "Ho", [SystemMessage("Be short."), HumanMessage("Hi")]])) == 3
class Mood(BaseModel):
    mood: Literal["good", "bad"]
assert make_chat(60).with_structured_output(Mood, method="json_schema").invoke("Hi").mood in ("good", "bad")
for ask in (lambda long: chat.invoke(long), lambda long: list(chat.stream(long))):
    try:
        ask("word " * 100_000)
    except ContextOverflowError as error:
        print("recognised", error)
"""


def test_langchain_is_served_and_recognises_what_is_too_long(
    demo: System, environment: Callable[[str], Environment]
) -> None:
    told = environment("langchain").run("python", "-c", LANGCHAIN, demo.http_url)
    assert told.count("recognised") == 2


def test_schemathesis_finds_nothing(demo: System, environment: Callable[[str], Environment]) -> None:
    """All that it can think of is answered as the document says, and nothing with an error of the server's."""
    told = environment("schemathesis").run(
        "schemathesis",
        "run",
        f"{demo.http_url}/openapi.json",
        "--checks=all",
        # What the document cannot say: a token id beyond the vocabulary, a min_tokens above max_tokens. And how long an
        # answer takes: that tells how busy the machine is.
        "--exclude-checks=positive_data_acceptance",
        "--max-response-time=1500",
        "--max-examples=50",
        "--seed=1",
        # A thousand prompts of many tokens in one call are answered, and take their time on a busy machine.
        "--request-timeout=1500",
        "--suppress-health-check=all",
        # That ids of calls and names of models are guessed, and not found.
        "--warnings=off",
        seconds=1800,
    )
    assert "No issues found" in told


def test_guidellm_completes_a_load(demo: System, environment: Callable[[str], Environment]) -> None:
    program = environment("guidellm")
    for call in ("completions", "chat/completions"):
        report = program.folder / "report.json"
        told = program.run(
            "guidellm",
            "run",
            f"--backend=kind=openai_http,target={demo.http_url}/v1,request_format=/v1/{call}",
            "--profile=kind=concurrent,streams=4",
            "--constraint=kind=max_requests,count=60",
            f"--tokenizer=kind=huggingface_auto,model={DEMO}",
            "--data=kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            f"--output=kind=json,path={report}",
            "--disable-console-interactive",
            HF_HUB_OFFLINE="1",
        )
        (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
        assert benchmark["metrics"]["request_totals"] == {
            "successful": 60,
            "errored": 0,
            "incomplete": 0,
            "total": 60,
        }, told


def test_the_client_for_node_uses_an_adapter_by_name(tmp_path: Path) -> None:
    make_tiny_adapter(tmp_path / "adapters" / "sql", DEMO, 1)
    shutil.copy(FEATURES.with_name("openai_adapter.mjs"), tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "openai"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=1200, capture_output=True)
    root = str(tmp_path / "adapters")
    flags = [*FLAGS, "--max-loras", "1", "--lora-root", root, "--lora-modules", "sql=sql"]
    worker_flags = ["--num-threads", "1", "--worker-lora-root", root]
    with System(DEMO, tmp_path / "system", flags, worker_flags) as system:
        system.services["scheduler"].wait_for_log("an adapter can be used")
        line = ["node", "openai_adapter.mjs", system.http_url, "demo", "sql"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["listed"] == {"demo": None, "sql": "demo"}
    (_, base, base_id), (name, text, adapter_id) = told["whole"]["demo"], told["whole"]["sql"]
    assert (name, told["streamed"]) == ("sql", {"demo": base, "sql": text})
    assert text != base
    assert adapter_id.startswith(f"{base_id}+")
