"""What README and the guides show is run as it stands there, at the real services: only the addresses are others."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import json_format

from blockyard import Client
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.kit.authority import Authority
from tests.unit.docs.commands import AT_SERVICES, PROGRAMS, ROOT, Command, held_by, shown

if TYPE_CHECKING:
    from tests.kit.processes.system import System

# What a program on a page takes for granted, by the line that it begins with.
BEFORE = {
    "client.completions.create(": (
        "import openai\nclient = openai.OpenAI(base_url='http://127.0.0.1:8000/v1', api_key='unused')"
    ),
    'client = blockyard.Client("gateway.example:50051"': "import blockyard, openai\nkey = 'by-secret'",
}
# What an answer has in it, by a part of the command; several may apply.
ANSWERS = {
    "/v1/completions": r'"text":\s?"[^"]',
    "/v1/chat/completions": r"(?s)\nid: 0:\d+:\d+:[0-9a-f]{8}\n.*\ndata: \[DONE\]\n",
    "/v1/models": r'"id":\s?"demo"',
    "/generate": r'"text_output":\s?"def read_lines',
    "/status": r'"replicas":',
    "/metrics": r"(?m)^blockyard_ready(\{.*\})? 1(\.0)?$",
    "admin status --json": r'"incarnation":',
}


def run(command: list[str], system: System, folder: Path) -> str:
    """Runs a program as a user's shell does, and returns what it writes."""
    (folder / ".curlrc").write_text("fail\nsilent\nshow-error\n")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CURL_HOME": str(folder),
        "NO_PROXY": "*",
        "PYTHONPATH": str(ROOT),
        "BLOCKYARD_ADMIN_ADDRESS": f"127.0.0.1:{system.port('admin')}",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def at(system: System, text: str) -> str:
    """A command, or a program, with the addresses of a system in place of the documented ones."""
    http = system.http_url.removeprefix("http://")
    for told, real in {
        "gateway-1:50051,gateway-2:50051": f"{system.grpc_target},{system.grpc_target}",
        "127.0.0.1:50051": system.grpc_target,
        "127.0.0.1:8000": http,
        "localhost:8000": http,
    }.items():
        text = text.replace(told, real)
    return text


@pytest.mark.parametrize("command", held_by(AT_SERVICES.test), ids=str)
def test_it_works_at_the_services(command: Command, demo: System, tmp_path: Path) -> None:
    told = run(["sh", "-e", "-c", at(demo, command.text)], demo, tmp_path)
    patterns = [pattern for part, pattern in ANSWERS.items() if part in command.text]
    assert patterns, "say what it answers"
    assert all(re.search(pattern, told) for pattern in patterns), told


@pytest.mark.parametrize("page", sorted({command.page for command in held_by(PROGRAMS.test)}))
def test_the_programs_of_a_page_run(page: str, demo: System, tmp_path: Path) -> None:
    """One after the other in one process: a page's programs build on those before."""
    Authority(tmp_path / "authority").certificate.rename(tmp_path / "ca.pem")
    programs = [command for command in held_by(PROGRAMS.test) if command.page == page]
    parts: list[str] = []
    for program in programs:
        parts += [before for beginning, before in BEFORE.items() if program.text.startswith(beginning)]
        parts.append(program.text)
    file = tmp_path / "program.py"
    file.write_text(at(demo, "\n".join(parts)), encoding="utf-8")
    told = run([sys.executable, "-W", "error", str(file)], demo, tmp_path)
    assert len(told.splitlines()) >= sum(program.text.count("print(") for program in programs)


def test_the_demo_runs(demo: System, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"^demo: setup\n\t\$\(BIN\)/(python .+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = run(["sh", "-c", recipe.replace("examples/", f"{ROOT}/examples/")], demo, tmp_path)
    assert "class Message:" in told
    assert "everything is stopped again" in told


def test_what_grpcurl_is_told_is_a_request(demo: System) -> None:
    (command,) = [command for command in shown() if command.first_line.startswith("grpcurl")]
    words = shlex.split(command.text.replace("\\\n", " "))
    assert words[:3] == ["grpcurl", "-plaintext", "-d"]
    request = json_format.Parse(words[3], inference_pb2.StreamGenerateRequest())
    method = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name["StreamGenerate"]
    assert words[-1].replace("/", ".") == method.full_name
    with grpc.insecure_channel(at(demo, words[-2])) as channel:
        events = [each.event for each in inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request)]
    # It is sampled, and may end before.
    assert 1 <= events[-1].finished.usage.num_completion_tokens <= request.spec.stop.max_tokens == 8


def test_logs_are_joined_by_the_request(demo: System, tmp_path: Path) -> None:
    (command,) = [command for command in shown() if command.first_line.startswith("grep")]
    with Client(demo.grpc_target) as client:
        client.generate("x", max_tokens=2, request_id="req-0")
    for log in demo.folder.glob("*.log"):
        (tmp_path / log.name).symlink_to(log)
    told = run(["sh", "-e", "-c", command.text], demo, tmp_path)
    assert all(f" {service} " in told for service in ("gateway", "scheduler")), told
    assert "request finished" in told


def test_the_answers_of_commands_are_looked_at(demo: System, tmp_path: Path) -> None:
    """A curl that is refused fails, and what it was told stands in the message."""
    body = json.dumps({"prompt": "x", "max_tokens": -1})
    command = f"curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    with pytest.raises(AssertionError, match="400"):
        run(["sh", "-e", "-c", at(demo, command)], demo, tmp_path)
