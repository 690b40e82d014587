"""The commands, as a user calls them: what is on standard output, what on standard error, and the exit code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import blockyard
from blockyard.errors import BlockyardError, Reason, Violation
from blockyard.inference.v1 import inference_pb2
from blockyard.local.supervisor import ROOT
from tests.kit.fakes.fake_gateway import Cut
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.fakes.fake_gateway import FakeGateway

Captured = pytest.CaptureFixture[str]


def program(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts the program as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "blockyard.cli.main", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def test_version(capsys: Captured) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out == f"{blockyard.__version__}\n"


def test_version_is_an_option_too(capsys: Captured) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"{blockyard.__version__}\n"


@pytest.mark.parametrize("place", ["before", "behind", "both"])
def test_the_options_of_a_connection_stand_before_a_command_or_behind_it(gateway: FakeGateway, place: str) -> None:
    key = ["--api-key", "the-one"]
    before, behind = {"before": (key, []), "behind": ([], key), "both": (["--api-key=other"], key)}[place]
    assert run(*before, "generate", "x", "--max-tokens=1", "--target", gateway.target, *behind) == 0
    assert gateway.keys == ["the-one"]


def test_the_options_of_a_connection_come_from_the_environment(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKYARD_API_KEY", "told")
    assert run("generate", "x", "--max-tokens=1", "--target", gateway.target) == 0
    assert gateway.keys == ["told"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["genrate", "x"], "generate"),
        (["generate", "x", "--tempratur", "1"], "--temperature"),
        (["generate", "x", "--api-kye", "k"], "--api-key"),
        (["serve", "--modle", "m"], "--model"),
        (["admin", "statos"], "status"),
    ],
)
def test_what_is_misspelt_is_told_what_was_meant(arguments: list[str], meant: str, capsys: Captured) -> None:
    assert run(*arguments) == 2
    assert meant in capsys.readouterr().err.partition("Error")[2]


def test_every_command_has_help_in_one_style(capsys: Captured) -> None:
    for command in ("generate", "chat", "bench", "top", "serve", "admin", "keys"):
        assert run(command, "-h") == 0
        out = capsys.readouterr().out
        assert "Usage: blockyard " + command in out
        assert "\nOptions:\n" in out
        assert "  -h, --help" in out


def test_help_names_the_commands(capsys: Captured) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for command in ("serve", "generate", "chat", "bench", "version"):
        assert command in out


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_generate_writes_the_text_alone(gateway: FakeGateway, capsys: Captured, stream: str) -> None:
    assert run("generate", "one two", stream, "--max-tokens", "3", "--target", gateway.target) == 0
    assert capsys.readouterr() == ("one two one\n", "")


def test_generate_passes_its_options_on(gateway: FakeGateway, capsys: Captured) -> None:
    flags = "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.25 --seed 0 --n 2 --stop a --stop b --ignore-eos --model m"
    assert run("generate", "x", *flags.split(), "--max-tokens", "1", "--target", gateway.target) == 0
    assert capsys.readouterr().out == "x\nx\n"
    (spec,) = gateway.specs
    sampling = spec.sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.5, 3, 0.25, 0)
    assert (spec.n, spec.model, spec.stop.ignore_eos, list(spec.stop.stop_strings)) == (2, "m", True, ["a", "b"])


def test_generate_leaves_out_what_is_not_given(gateway: FakeGateway) -> None:
    run("generate", "x", "--target", gateway.target)
    (spec,) = gateway.specs
    assert not spec.sampling.HasField("temperature")
    assert not spec.sampling.HasField("seed")
    assert not spec.stop.HasField("max_tokens")


def test_generate_reads_standard_input(gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    monkeypatch.setenv("BLOCKYARD_TARGET", gateway.target)
    assert run("generate", "-", "--max-tokens", "3") == 0
    assert capsys.readouterr().out == "from a pipe\n"


def test_an_error_is_one_line(gateway: FakeGateway, capsys: Captured) -> None:
    gateway.failures.append(BlockyardError(Reason.FIELD_INVALID, "n: too\nmany", (Violation("n", "too many"),)))
    assert run("generate", "x", "--target", gateway.target) == 1
    assert capsys.readouterr() == ("", "error: FIELD_INVALID: n: too many\n")


@pytest.mark.parametrize("command", [("generate", "x", "--target"), ("bench", "--target"), ("chat", "--target")])
def test_without_a_server_it_says_how_to_start_one(nowhere: str, capsys: Captured, command: tuple[str, ...]) -> None:
    assert run(*command, nowhere) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: no server answers \(.*\): start one with `blockyard serve`.*\n", err)


def test_a_server_that_is_not_ready_is_another_matter(gateway: FakeGateway, capsys: Captured) -> None:
    gateway.failures.extend([BlockyardError(Reason.NO_READY_WORKER, "loading", retry_after_seconds=0.0)] * 9)
    assert run("generate", "x", "--target", gateway.target) == 1
    assert capsys.readouterr().err == "error: NO_READY_WORKER: loading\n"


@pytest.mark.parametrize(
    "arguments", [("generate",), ("generate", "x", "--n", "0"), ("fly",), ("bench", "--rate", "x")]
)
def test_a_bad_command_line(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


def test_an_interrupt_ends_the_answer_quietly(gateway: FakeGateway) -> None:
    gateway.hold_after = 2
    process = program("generate", "one two", "--target", gateway.target)
    assert process.stdout is not None
    assert process.stdout.read(3) == "one"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert gateway.saw_cancel.wait(10)


def test_a_reader_that_has_enough_is_not_complained_to(gateway: FakeGateway) -> None:
    with program("generate", "one two", "--max-tokens", "5000", "--target", gateway.target) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


def said(spec: Any) -> list[tuple[str, str]]:
    """The roles and texts of a chat."""
    return [
        (inference_pb2.Role.Name(message.role).removeprefix("ROLE_").lower(), message.content[0].text)
        for message in spec.conversation.messages
    ]


def test_chat_remembers(gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(monkeypatch, "hello there", "", "again", "/clear", "new", "/quit", "never said")
    assert run("chat", "--target", gateway.target, "--system", "be kind", "--max-tokens", "2", "--seed", "1") == 0
    assert capsys.readouterr().out == "hello there\nagain again\nnew new\n"
    first, second, third = gateway.specs
    system = ("system", "be kind")
    assert said(first) == [system, ("user", "hello there")]
    assert said(second) == [*said(first), ("assistant", "hello there"), ("user", "again")]
    assert said(third) == [system, ("user", "new")]
    assert (first.model, first.stop.max_tokens, first.sampling.seed) == ("fake", 2, 1)
    assert not first.sampling.HasField("temperature")


def test_chat_ends_with_its_input(gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(monkeypatch, "one")
    assert run("chat", "--target", gateway.target, "--max-tokens", "1", "--temperature", "0") == 0
    assert capsys.readouterr().out == "one\n"
    assert gateway.specs[0].sampling.HasField("temperature")


def test_chat_in_a_pipe_fails_with_its_server(
    gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(monkeypatch, "one", "two")
    gateway.cuts.append(Cut(0, BlockyardError(Reason.FEATURE_DISABLED, "the model has no chat template")))
    assert run("chat", "--target", gateway.target) == 1
    assert "FEATURE_DISABLED: the model has no chat template" in capsys.readouterr().err
    assert len(gateway.specs) == 1


def test_chat_with_a_gateway_that_has_no_model_yet_says_what_is_missing(
    gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(monkeypatch, "one")
    gateway.ready = False
    gateway.cuts.append(Cut(0, BlockyardError(Reason.FEATURE_DISABLED, "not yet")))
    assert run("chat", "--target", gateway.target) == 1
    assert "not yet" in capsys.readouterr().err
    assert gateway.specs[0].model == ""


def test_an_answer_goes_on_after_a_break(
    gateway: FakeGateway, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(monkeypatch, "one two three")
    gateway.cuts.append(Cut(2))
    assert run("chat", "--target", gateway.target, "--max-tokens", "3") == 0
    assert capsys.readouterr().out == "one two three\n"
    assert len(gateway.resumes) == 1


def test_an_interrupt_stops_the_answer_and_not_the_conversation(gateway: FakeGateway) -> None:
    gateway.hold_after = 3
    process = program("chat", "--target", gateway.target, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("on and on\n")
    process.stdin.flush()
    assert process.stdout.read(6) == "on and"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/quit\n", timeout=30)
    assert out == " (stopped)\n"
    assert process.returncode == 0
    assert "Traceback" not in err
    assert gateway.saw_cancel.wait(10)


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_bench(gateway: FakeGateway, capsys: Captured, tmp_path: Path, api: str) -> None:
    output = tmp_path / "result.json"
    flags = ["--api", api, "--target", gateway.target, "--url", gateway.url, "--output", str(output)]
    lengths = ["--prompt-tokens", "2:4", "--output-tokens", "2"]
    assert run("bench", *flags, *lengths, "--concurrency", "2", "--num-requests", "6", "--warmup", "1") == 0
    out = capsys.readouterr().out
    assert "6 requests in" in out
    assert "0 failed" in out
    for row in ("time to first token", "inter token latency", "time per output token", "end to end"):
        assert re.search(rf"{row} +│ +\d+\.\d\d", out), out
    told = json.loads(output.read_text())
    assert told["version"] == blockyard.__version__
    assert told["machine"]["num_cores"] == os.cpu_count()
    assert told["settings"]["api"] == api
    assert told["settings"]["shape"]["prompt_tokens"] == [2, 4]
    results = told["results"]
    assert (results["num_requests"], results["num_output_tokens"], results["errors"]) == (6, 12, {})
    assert set(results["time_to_first_token"]["percentiles"]) == {"50", "90", "99"}
    assert len(gateway.specs) + len(gateway.http_bodies) == 7


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_bench_sends_edits_of_code(gateway: FakeGateway, api: str) -> None:
    flags = ["--api", api, "--target", gateway.target, "--url", gateway.url, "--workload", "edits"]
    assert run("bench", *flags, "--num-requests", "2", "--warmup", "0", "--output-tokens", "2") == 0
    prompts = [spec.text for spec in gateway.specs] + [body["prompt"] for body in gateway.http_bodies]
    assert len(set(prompts)) == 2
    assert all("# Before:" in prompt for prompt in prompts)


def test_bench_with_a_rate_and_a_duration(gateway: FakeGateway, capsys: Captured) -> None:
    flags = ["--rate", "100", "--duration", "0.3", "--warmup", "0", "--output-tokens", "2"]
    assert run("bench", "--target", gateway.target, *flags) == 0
    assert "requests in 0." in capsys.readouterr().out


def test_bench_tells_what_failed(gateway: FakeGateway, capsys: Captured) -> None:
    gateway.cuts.extend([Cut(1, BlockyardError(Reason.POISON_REQUEST, "it kills workers"))] * 3)
    assert run("bench", "--target", gateway.target, "--num-requests", "3", "--warmup", "0") == 1
    assert capsys.readouterr().err == "3 failed: POISON_REQUEST\n"


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_bench_sends_as_a_tenant(gateway: FakeGateway, api: str) -> None:
    flags = ["--api", api, "--target", gateway.target, "--url", gateway.url, "--tenant", "team-1"]
    assert run("bench", *flags, "--num-requests", "1", "--warmup", "0") == 0
    told = gateway.tenants if api == "grpc" else gateway.http_heads[-1].split("\r\n")
    assert ("team-1" if api == "grpc" else "x-blockyard-tenant: team-1") in told


def test_bench_comes_back_when_it_is_told_to(gateway: FakeGateway, capsys: Captured, tmp_path: Path) -> None:
    full = BlockyardError(Reason.QUEUE_FULL, "full", retry_after_seconds=0.001)
    gateway.cuts.extend([Cut(0, full)] * 4)
    output = tmp_path / "result.json"
    flags = ["--target", gateway.target, "--output", str(output)]
    assert run("bench", *flags, "--num-requests", "2", "--warmup", "0") == 0
    assert "4 times refused with a time to come back" in " ".join(capsys.readouterr().out.split())
    results = json.loads(output.read_text())["results"]
    assert (results["num_requests"], results["num_rejections"], results["num_errors"]) == (2, 4, 0)


@pytest.mark.parametrize("lengths", ["0", "4:2", "x", "1:y", "-1"])
def test_bench_with_bad_lengths(capsys: Captured, lengths: str) -> None:
    assert run("bench", f"--prompt-tokens={lengths}") == 2
    assert "FROM:TO" in capsys.readouterr().err


def test_bench_refuses_a_file_that_it_cannot_write_before_it_measures(
    gateway: FakeGateway, capsys: Captured, tmp_path: Path
) -> None:
    assert run("bench", "--target", gateway.target, "--output", str(tmp_path / "nowhere" / "a.json")) == 2
    assert "--output" in capsys.readouterr().err
    assert gateway.specs == []
