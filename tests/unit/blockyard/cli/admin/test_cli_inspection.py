"""`blockyard admin inspect` and `call`, as an operator calls them."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from blockyard.errors import BlockyardError, Reason
from tests.kit.fakes.fake_admin import FakeAdmin
from tests.unit.blockyard.cli.invoking import run
from tests.unit.docs.commands import Command, held_by

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with FakeAdmin() as running:
        yield running


def ask(admin: FakeAdmin, *arguments: str) -> int:
    return run("admin", *arguments, "--admin-address", admin.address)


def test_inspect_writes_what_workers_say(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "inspect") == 0
    assert capsys.readouterr().out == "LlamaForCausalLM 0\n"
    admin.num_ranks = 2
    assert ask(admin, "inspect", "--replica", "a") == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["rank 1 (10.0.0.1:50070)", "LlamaForCausalLM 1"]
    assert admin.asked[-1].replica == "a"
    assert ask(admin, "inspect", "--json") == 0
    assert json.loads(capsys.readouterr().out)[1]["result"]["text"] == "LlamaForCausalLM 1"


def test_call_asks_for_an_operation_by_its_fields(admin: FakeAdmin, capsys: Captured) -> None:
    assert ask(admin, "call", "memory-summary", "--timeout", "1.5") == 0
    [answer] = json.loads(capsys.readouterr().out)
    assert (answer["rank"], answer["result"]) == (0, {"text": "LlamaForCausalLM 0"})
    [asked] = admin.asked
    assert (asked.extension, asked.operation, asked.payload) == ("diagnostics", "memory_summary", b"{}")
    assert asked.timeout.ToMilliseconds() == 1500
    assert ask(admin, "call", "weight-norms", "--arguments", '{"names": ["a", "b"]}') == 0
    assert json.loads(admin.asked[1].payload) == {"names": ["a", "b"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["reboot"], "there is no operation 'reboot': name one of check_numerics"),
        (["weight-norms", "--arguments", "{"], "Expecting property name"),
        (["e.o", "--payload", "@/no/such/file"], "/no/such/file: No such file"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    admin: FakeAdmin, capsys: Captured, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert ask(admin, "call", *arguments) == 2
    assert told in capsys.readouterr().err
    assert not admin.asked


def test_call_hands_a_payload_to_an_extension(
    admin: FakeAdmin, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert ask(admin, "call", "probe.look", "--payload", "text") == 0
    assert capsysbinary.readouterr().out == b"0 text\n"
    assert (admin.asked[0].extension, admin.asked[0].operation) == ("probe", "look")
    file = tmp_path / "payload"
    file.write_bytes(b"\xff\n")
    admin.num_ranks = 2
    assert ask(admin, "call", "probe.look", "--payload", f"@{file}") == 0
    expected = b"rank 0 (10.0.0.0:50070)\n0 \xff\nrank 1 (10.0.0.1:50070)\n1 \xff\n"
    assert capsysbinary.readouterr().out == expected
    assert ask(admin, "call", "probe.look", "--json") == 0
    assert [each["rank"] for each in json.loads(capsysbinary.readouterr().out)] == [0, 1]


def test_an_error_is_told(admin: FakeAdmin, capsys: Captured) -> None:
    admin.errors["CallExtension"] = BlockyardError(Reason.OPERATION_DEADLINE, "no answer within 3 s of rank 1 (b)")
    assert ask(admin, "call", "probe.look") == 1
    assert "no answer within 3 s of rank 1 (b)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    held_by("tests/unit/blockyard/cli/admin/test_cli_inspection.py::test_what_the_guide_says_works"),
    ids=str,
)
def test_what_the_guide_says_works(admin: FakeAdmin, command: Command) -> None:
    assert ask(admin, *shlex.split(command.text)[2:]) == 0
    assert len(admin.asked) == 1
