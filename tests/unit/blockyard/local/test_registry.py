"""The list of running systems: its files, and which of them count."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from blockyard.configuration import PublicSettings, SystemConfiguration
from blockyard.local import registry
from blockyard.local.local_system import LocalSystem
from blockyard.local.registry import Entry, RegistryError, find_serving, find_system, list_systems, registered
from blockyard.local.user_folders import systems_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def make_entry(name: str, **changes: Any) -> Entry:
    """Makes the entry of a system that this process would be."""
    started = psutil.Process().create_time()
    entry = Entry(name, "up", os.getpid(), started, "", "main", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "unix:/x")
    return replace(entry, **changes)


def write(entry: Entry) -> Path:
    path = systems_folder() / f"{entry.name}.json"
    path.write_text(json.dumps(asdict(entry)))
    return path


@pytest.fixture
def system() -> Iterator[LocalSystem]:
    system = LocalSystem(SystemConfiguration(public=PublicSettings(grpc_port=0, http_port=0, admin_port=0)))
    yield system
    asyncio.run(system.close())


def test_a_system_is_listed_while_it_runs(system: LocalSystem) -> None:
    with registered(system, "serve") as entry:
        assert list_systems() == [entry]
        assert (entry.name, entry.http, entry.url) == ("demo", system.endpoints.http, f"http://{system.endpoints.http}")
        (path,) = systems_folder().iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with registered(system, "run") as other:
            assert other.name == "demo-2"
            assert find_serving("", "main") == entry, "a chat's system ends with it"
    assert list_systems() == []


def test_a_name_is_given_once(system: LocalSystem) -> None:
    with registered(system, "serve", name="mine") as entry:
        assert find_system("mine") == entry
        assert find_system(str(os.getpid())) == entry
        with pytest.raises(RegistryError, match="mine runs already"), registered(system, "serve", name="mine"):
            pass
        with pytest.raises(RegistryError, match="no system yours runs here: there are mine"):
            find_system("yours")
    with pytest.raises(RegistryError, match="none does"):
        find_system("mine")
    with pytest.raises(RegistryError, match="must be 1 to 64"), registered(system, "serve", name="../mine"):
        pass


def test_what_has_ended_is_not_listed_and_its_file_goes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    paths = [
        write(make_entry("ended", pid=ended.pid)),
        write(make_entry("reused", started=psutil.Process().create_time() - 100)),
    ]
    paths.append(systems_folder() / "broken.json")
    paths[-1].write_text("{")
    alive = write(make_entry("alive"))
    assert [entry.name for entry in list_systems()] == ["alive"]
    assert [path for path in paths if path.exists()] == []
    assert alive.exists()


def test_a_model_is_found_by_its_folder_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    entry = make_entry("m", model=registry.normalize("model"))
    write(entry)
    assert find_serving(registry.normalize("./model"), "main") == entry
    assert find_serving("./model", "main") == entry
    assert find_serving(entry.model, "other") is None


def test_a_model_among_several_is_found_with_its_name_in_requests(tmp_path: Path) -> None:
    folder = str(tmp_path)
    entry = make_entry("m", models=[["demo", "", "main"], ["mine", folder, "main"]])
    write(entry)
    assert find_serving(folder, "main") == entry
    assert (entry.find_name(folder, "main"), entry.find_name("", "main")) == ("mine", "demo")
    assert find_serving(folder, "other") is None


def test_a_system_runs_unlisted_where_nothing_can_be_written(
    system: LocalSystem, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("a file")
    with registered(system, "serve") as entry:
        assert entry.name == "demo"
    assert "`blockyard ps` does not list this system" in caplog.text


def test_names_come_of_models() -> None:
    assert registry.free_name("Qwen3 0.6B/x") == "Qwen3-0.6B-x"
    write(make_entry("demo"))
    assert registry.free_name("demo") == "demo-2"
