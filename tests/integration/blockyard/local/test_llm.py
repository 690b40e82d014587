"""LLM over a fake gateway in a real child process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blockyard import LLM, BlockyardError, Delta, Message
from blockyard.local.local_system import LocalSystem
from blockyard.local.supervisor import ROOT, StartError
from blockyard.settings import SettingsError


def children() -> set[int]:
    """Processes that this one started and that still run."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(stat.parent.name))
    return found


def test_answers_come_in_the_order_of_the_prompts(fake_services: Path) -> None:
    before = children()
    with LLM() as llm:
        prompts = [f"w{number}" for number in range(100)]
        assert [completion.text for completion in llm.generate(prompts, max_tokens=1)] == prompts
        ids = llm.generate([[1, 2], [3]], max_tokens=2, return_token_ids=True, progress=True)
        assert [completion.token_ids for completion in ids] == [(1, 2), (3, 3)]
        assert llm.generate([]) == []
        with llm.stream("a b", max_tokens=2) as stream:
            assert [event.text for event in stream if isinstance(event, Delta)] == ["a", " b"]
        assert llm.tokenize("ab c") == [0, 2, 1]
        assert llm.detokenize([1, 2]) == "x xx"
        assert llm.model.name == "fake"
        assert llm.http_url.startswith("http://127.0.0.1:")
        assert len(children() - before) == 1
    assert children() == before
    llm.close()


def test_conversations_are_answered_in_their_order(fake_services: Path) -> None:
    with LLM() as llm:
        conversations = [[Message("user", f"w{number}")] for number in range(20)]
        answers = llm.chat(conversations, max_tokens=1, tool_choice="none")
        assert [completion.text for completion in answers] == [f"w{number}" for number in range(20)]
        assert llm.chat([]) == []
        for conversation in ([Message("user", "a")], [{"role": "user", "content": "a"}]):
            with pytest.raises(TypeError, match=r"chat\(\[messages\]\)"):
                llm.chat(conversation)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="one prompt only"):
            llm.chat(conversations, request_id="r")


def test_an_error_of_one_prompt_is_raised(fake_services: Path) -> None:
    with LLM() as llm, pytest.raises(BlockyardError, match=r"sampling\.top_k"):
        llm.generate(["a", "b"], top_k=-1)


def test_it_waits_until_all_replicas_are_ready(fake_services: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in takes requests as soon as it listens, and has one replica of two for three looks more."""
    told: list[str] = []
    real = LocalSystem.find_missing

    async def find_missing(self: LocalSystem) -> str:
        told.append(await real(self))
        return "" if told.count("the scheduler has 1 of 2 replicas") > 3 else told[-1]

    monkeypatch.setattr(LocalSystem, "find_missing", find_missing)
    with LLM(data_parallel_size=2):
        assert told.count("the scheduler has 1 of 2 replicas") == 4


def test_it_says_what_is_missing_when_its_time_is_over(fake_services: Path) -> None:
    before = children()
    with pytest.raises(StartError, match="not ready after 0 s: the gateway does not answer"):
        LLM(start_timeout_seconds=0)
    assert children() == before


def test_it_ends_when_it_is_forgotten(fake_services: Path) -> None:
    before = children()
    llm = LLM()
    assert children() != before
    del llm
    gc.collect()
    assert children() == before


def test_it_ends_with_a_script_that_does_not_close_it(fake_services: Path) -> None:
    script = fake_services / "script.py"
    script.write_text(
        "import blockyard\n"
        "from blockyard.local.local_system import LocalSystem\n"
        "from blockyard.local.supervisor import Service\n"
        "real = LocalSystem.make_services\n"
        "LocalSystem.make_services = lambda self: [Service('gateway', 'stand_in_gateway', real(self)[-1].flags)]\n"
        "llm = blockyard.LLM()\n"
        "print(llm.generate(['a b'], max_tokens=2)[0].text)\n"
        "print(llm._system._supervisor.children[0].pid)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{fake_services}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    text, pid = done.stdout.split("\n")[:2]
    assert text == "a b"
    assert not Path(f"/proc/{pid}").exists()
    assert "Traceback" not in done.stderr


def test_a_service_that_does_not_start_is_an_error(fake_services: Path) -> None:
    (fake_services / "stand_in_gateway.py").write_text("raise SystemExit('no weights')")
    before = children()
    with pytest.raises(StartError, match="no weights"):
        LLM()
    assert children() == before


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"heat": 3}, TypeError, "unknown settings: heat$"),
        ({"max_num_seq": 3}, TypeError, r"max_num_seq \(did you mean max_num_seqs\?\)"),
        ({"worker_address": "x"}, TypeError, "worker_address .the services find one another on private sockets"),
        ({"device": "tpu"}, SettingsError, "'tpu' is none of"),
        ({"max_num_seqs": 0, "dtype": "int3"}, SettingsError, "(?s)dtype.*max-num-seqs"),
        ({"model": "/nowhere/at/all"}, BlockyardError, "no folder on this machine"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        LLM(**settings)


def test_misuse(fake_services: Path) -> None:
    with LLM() as llm:
        with pytest.raises(TypeError, match=r"generate\(\[prompt\]\)"):
            llm.generate("a")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="one prompt only"):
            llm.generate(["a", "b"], request_id="r")
        with pytest.raises(TypeError, match="unknown options: heat"):
            llm.generate(["a"], heat=1)  # type: ignore[call-arg]


def test_settings_reach_the_services(fake_services: Path) -> None:
    with LLM(max_num_seqs=3, enable_prefix_caching=False, served_model_name="x y") as llm:
        (child,) = llm._system._supervisor.children  # type: ignore[union-attr]
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode().split("\0")
        assert "--served-model-name=x y" in command
        assert "--log-level=error" in command


def test_a_start_that_is_interrupted_leaves_nothing(fake_services: Path) -> None:
    (fake_services / "stand_in_gateway.py").write_text("import time; time.sleep(600)")
    script = (
        "import threading, os, signal, time\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "import blockyard\n"
        "from blockyard.local.local_system import LocalSystem\n"
        "from blockyard.local.supervisor import Service\n"
        "LocalSystem.make_services = lambda self: [Service('gateway', 'stand_in_gateway')]\n"
        "blockyard.LLM()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{fake_services}:{ROOT}"}
    # The stand-in sleeps for ten minutes: a start that waited for it would end by the timeout.
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
