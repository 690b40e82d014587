"""The three services as a user starts them on one machine: `LLM`, `blockyard serve`, and the commands beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import LLM
from blockyard.local.supervisor import StartError
from blockyard.model_files import DEMO_FOLDER
from tests.kit.processes.system import ROOT
from tests.kit.processes.user import blockyard, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blockyard.local.supervisor import Child

# One thread: it shares the machine with what else runs here, and a thread that waits for another one's turn is slow.
SMALL: dict[str, Any] = {"num_device_blocks": 60, "num_host_blocks": 0, "dtype": "float32", "num_threads": 1}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
PROMPTS = [f"Question {number}: what is" for number in range(12)]


@pytest.fixture(scope="module")
def single() -> Iterator[LLM]:
    """One worker."""
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    """Two workers, each a replica."""
    with LLM(**SMALL, data_parallel_size=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(single: LLM) -> list[str]:
    """What each prompt is answered by itself."""
    return [single.generate([prompt], max_tokens=12, temperature=0)[0].text for prompt in PROMPTS]


def test_llm_gives_together_what_it_gives_alone_and_outlives_its_worker(single: LLM, alone: list[str]) -> None:
    assert [completion.text for completion in single.generate(PROMPTS, max_tokens=12, temperature=0)] == alone
    assert answers_through(single, children(single)[0], signal.SIGKILL) == alone


def test_all_replicas_are_ready_once_it_returns(pair: LLM) -> None:
    status = pair._system.run(pair._system.local.ask_status())
    assert status is not None
    assert [replica.ready for replica in status.scheduler.replicas] == [True, True]
    assert len(pair.collective_rpc("describe_group")) == 2


def children(llm: LLM) -> list[Child]:
    supervisor = llm._system._supervisor
    assert supervisor is not None
    return supervisor.children


def answers_through(llm: LLM, child: Child, number: signal.Signals) -> list[str]:
    """Sends a signal to a service while a stream runs and requests arrive; tells their answers."""
    answers: list[str] = []

    def generate() -> None:
        answers.extend(completion.text for completion in llm.generate(PROMPTS, max_tokens=12, temperature=0))

    with llm.stream(PROMPTS[0], max_tokens=500, ignore_eos=True) as stream:
        next(stream.text_deltas())
        thread = threading.Thread(target=generate)
        thread.start()
        os.kill(child.pid, number)
    thread.join(60)
    return answers


def test_each_service_of_a_system_with_two_workers_comes_back(pair: LLM, alone: list[str]) -> None:
    assert [child.service.name for child in children(pair)] == ["worker-0", "worker-1", "scheduler", "gateway"]
    for child in children(pair):
        os.kill(child.pid, signal.SIGKILL)
        answers = pair.generate(PROMPTS, max_tokens=12, temperature=0)
        assert [completion.text for completion in answers] == alone, child.service.name


def test_two_workers_of_one_replica_answer_as_one_and_outlive_each_other(alone: list[str]) -> None:
    with LLM(**SMALL, tensor_parallel_size=2) as llm:
        answers = llm.generate(PROMPTS, max_tokens=12, temperature=0)
        assert [completion.text for completion in answers] == alone
        for child in children(llm)[:2]:
            assert answers_through(llm, child, signal.SIGKILL) == alone, child.service.name


def test_a_worker_that_is_told_to_stop_loses_nothing_and_is_replaced(pair: LLM, alone: list[str]) -> None:
    for child in children(pair)[:2]:
        pid = child.pid
        assert answers_through(pair, child, signal.SIGTERM) == alone
        deadline = time.monotonic() + 20
        while child.pid == pid:
            assert time.monotonic() < deadline
            # Another process's end, of which only its supervisor is told.
            time.sleep(0.01)


def test_llm_tells_what_to_repair_instead_of_waiting(tmp_path: Path) -> None:
    for file in DEMO_FOLDER.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((DEMO_FOLDER / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(StartError, match="is damaged or not complete"):
        LLM(str(tmp_path), **SMALL)
    with pytest.raises(StartError, match="--max-model-len 2000 is above the 1024 tokens of the model"):
        LLM(max_model_len=2000, **SMALL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`blockyard serve` in a process of its own, and the addresses that it told."""
    ports = ["--grpc-port=0", "--http-port=0", "--admin-port=0"]
    with serving(tmp_path_factory.mktemp("serve"), *FLAGS, *ports) as told:
        yield dict(re.findall(r"  (gRPC|HTTP) +(\S+)", told)) | {"told": told}


def test_generate_streams_what_it_gives_at_once(served: dict[str, str]) -> None:
    flags = ["Once upon a time", "--max-tokens=20", "--seed=1", "--target", served["gRPC"]]
    assert blockyard("generate", *flags).stdout == blockyard("generate", "--no-stream", *flags).stdout


def test_chat_answers(served: dict[str, str]) -> None:
    target = f"--target={served['gRPC']}"
    assert blockyard("chat", target, "--max-tokens=10", "--temperature=0", typed="hello\n/quit\n").stdout.strip()


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_bench_counts_every_token(served: dict[str, str], tmp_path: Path, api: str) -> None:
    where = ["--target", served["gRPC"], "--url", served["HTTP"].removesuffix("/v1"), "--api", api]
    amount = ["--num-requests=6", "--concurrency=3", "--prompt-tokens=8", "--output-tokens=5"]
    blockyard("bench", *where, *amount, "--output", str(tmp_path / "result.json"))
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (results["num_requests"], results["num_output_tokens"], results["errors"]) == (6, 30, {})


def test_the_lines_to_paste_work(served: dict[str, str]) -> None:
    lines = [line.strip() for line in served["told"].splitlines() if line.startswith(("  curl", "  python"))]
    for line in lines:
        command = line.replace("python ", f"{sys.executable} ", 1) if line.startswith("python") else f"{line} -sSf"
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        # A sampled answer may be empty: what is printed ends its line all the same.
        assert done.stdout
    assert len(lines) == 2
