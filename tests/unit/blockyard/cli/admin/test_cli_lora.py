"""`blockyard lora` at a fake admin port."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.errors import BlockyardError, Reason
from tests.kit.fakes.fake_admin import FakeAdmin, make_lora
from tests.unit.blockyard.cli.invoking import run
from tests.unit.docs.commands import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    Captured = pytest.CaptureFixture[str]


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with FakeAdmin() as fake:
        yield fake


def call(admin: FakeAdmin, *arguments: str) -> int:
    return run("lora", *arguments, "--admin-address", admin.address)


def commands_of_the_guide() -> list[list[str]]:
    called = [command.first_line for command in shown() if command.page == "docs/guides/lora.md"]
    return [shlex.split(line)[2:] for line in called if line.startswith("blockyard lora")]


@pytest.mark.parametrize("arguments", commands_of_the_guide(), ids=" ".join)
def test_what_the_guide_says_works(admin: FakeAdmin, arguments: list[str]) -> None:
    admin.loras["sql"] = make_lora("sql", "/adapters/sql")
    assert call(admin, *arguments) == 0
    assert len(admin.asked) == 1


def test_each_command_asks_for_what_it_says(admin: FakeAdmin, capsys: Captured) -> None:
    assert call(admin, "load", "sql", "/adapters/sql", "--in-place") == 0
    assert call(admin, "pin", "sql") == call(admin, "pin", "sql", "--off") == call(admin, "unload", "sql") == 0
    assert admin.asked == [
        admin_pb2.LoadLoraRequest(name="sql", path="/adapters/sql", load_inplace=True),
        admin_pb2.PinLoraRequest(name="sql", pinned=True),
        admin_pb2.PinLoraRequest(name="sql"),
        admin_pb2.UnloadLoraRequest(name="sql"),
    ]
    told = capsys.readouterr().out.splitlines()
    assert told == ["sql is loaded: rank 16, 50.0 MiB", "sql is pinned", "sql is no longer pinned", "sql is unloaded"]


def test_the_list_tells_where_adapters_are(admin: FakeAdmin, capsys: Captured) -> None:
    admin.loras["sql"] = make_lora("sql", "/adapters/sql")
    admin.loras["tone"] = make_lora("tone", "/adapters/tone")
    admin.loras["tone"].num_virtual_tokens = 20
    assert call(admin, "list") == 0
    headings, row, soft = capsys.readouterr().out.splitlines()
    assert headings.split() == ["adapter", "kind", "size", "digest", "loaded", "in", "slots", "pinned"]
    assert row.split() == ["sql", "rank", "16", "50.0", "MiB", "0123456789ab", "0", "0"]
    assert soft.split() == ["tone", "20", "tokens", "50.0", "MiB", "0123456789ab", "0", "0"]
    assert call(admin, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["loras"][0]["name"] == "sql"


def test_a_refusal_is_one_line(admin: FakeAdmin, capsys: Captured) -> None:
    admin.errors["LoadLora"] = BlockyardError(Reason.MODEL_NOT_LOADED, "the worker at w: it is of rank 64, above 16")
    assert call(admin, "load", "sql", "/adapters/sql") == 1
    assert "rank 64, above 16" in capsys.readouterr().err
