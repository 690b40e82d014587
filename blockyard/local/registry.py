"""The systems of this user that run on this machine, a file each.

A file names a process and the time of its start, so that the file of a process that was killed is recognized and
removed, even if another process has its number by now.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import psutil

from blockyard.local.user_folders import systems_folder
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from blockyard.local.local_system import LocalSystem
    from blockyard.local.model_services import ModelServices

_log = EventLogger(__name__)
Command = Literal["serve", "up", "run", "launch"]
# Starts of one process, read twice, differ by less than this.
_SAME_START_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
SUFFIX = ".json"


class RegistryError(Exception):
    """There is no such system, or the name is taken."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A running system.

    Attributes:
        name: unique among the systems of this user.
        command: the command that started it; "up": it runs in the background.
        pid: the process that supervises the services.
        started: the time of the process's start, in seconds since 1970.
        model: a folder (absolute) or hub id; empty: the demo model.
        revision: of a hub id.
        grpc, http, admin, local: addresses, as of `Endpoints`.
        tls: whether the public APIs use TLS.
        needs_key: whether callers need a key.
        log: the file of its log; empty: its log goes to a terminal or a pipe.
        models: if it has several models, a list of each: its name in requests, its folder or hub id, its revision.
    """

    name: str
    command: Command
    pid: int
    started: float
    model: str
    revision: str
    grpc: str
    http: str
    admin: str
    local: str
    tls: bool = False
    needs_key: bool = False
    log: str = ""
    models: list[list[str]] = field(default_factory=list[list[str]])

    def find_name(self, model: str, revision: str) -> str | None:
        """Returns a model's name in requests, empty if it is the only model; None: the system does not have it."""
        if not self.models:
            return "" if (self.model, self.revision) == (model, revision) else None
        return next((name for name, *others in self.models if others == [model, revision]), None)

    @property
    def is_alive(self) -> bool:
        return find_process(self) is not None

    @property
    def url(self) -> str:
        """The root of its HTTP APIs."""
        return f"{'https' if self.tls else 'http'}://{self.http}"

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.started)


def find_process(entry: Entry) -> psutil.Process | None:
    """Returns the system's process; None: it has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(entry.pid)
        is_same = abs(process.create_time() - entry.started) < _SAME_START_SECONDS
        if is_same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def list_systems() -> list[Entry]:
    """Lists the running systems by the time of their start; removes the files of those that have ended."""
    found: list[Entry] = []
    for path in systems_folder().glob("*" + SUFFIX):
        entry = _read(path)
        if entry is not None and entry.is_alive:
            found.append(entry)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda entry: entry.started)


def find_system(name: str) -> Entry:
    """Finds a running system by its name or its process id. Raises RegistryError."""
    systems = list_systems()
    for entry in systems:
        if name in (entry.name, str(entry.pid)):
            return entry
    there = ", ".join(entry.name for entry in systems)
    raise RegistryError(f"no system {name} runs here: " + (f"there are {there}" if there else "none does"))


def find_serving(model: str, revision: str) -> Entry | None:
    """Finds a system that serves this model, for others too: not one that ends with a chat or an agent."""
    model = normalize(model)
    shared = [entry for entry in list_systems() if entry.command in ("serve", "up")]
    return next((entry for entry in shared if entry.find_name(model, revision) is not None), None)


def normalize(model: str) -> str:
    """Returns a model folder's absolute path, and anything else as it is."""
    folder = os.path.expanduser(model)
    return os.path.realpath(folder) if model and os.path.isdir(folder) else model


def free_name(wanted: str) -> str:
    """Returns the name, with a number if a running system has it already."""
    base = re.sub(r"[^\w.-]", "-", wanted, flags=re.ASCII).lstrip("-._")[:56] or "system"
    taken = {entry.name for entry in list_systems()}
    names = [base, *(f"{base}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


@contextmanager
def registered(system: LocalSystem, command: Command, *, name: str = "", log: str = "") -> Generator[Entry]:
    """Lists this process as a running system inside the block. Raises RegistryError if the name is bad or taken.

    Where the list cannot be written, the system runs without: a warning says so.
    """
    entry = _make_entry(system, command, name, log)
    path = None
    try:
        entry = entry if name else replace(entry, name=free_name(entry.name))
        path = _write(entry)
    except FileExistsError:
        raise RegistryError(f"a system {entry.name} runs already: choose another --name") from None
    except OSError as error:
        _log.warning("`blockyard ps` does not list this system", file=error.filename, error=error.strerror)
    try:
        yield entry
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _write(entry: Entry) -> Path:
    list_systems()  # removes the file of an ended system of this name
    path = systems_folder() / (entry.name + SUFFIX)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(entry), file)
    return path


def _make_entry(system: LocalSystem, command: Command, name: str, log: str) -> Entry:
    configuration, endpoints = system.configuration, system.endpoints
    model = normalize(configuration.model.model)
    if name and not _NAME.fullmatch(name):
        raise RegistryError(f"--name {name} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    return Entry(
        name=name or system.models[0].name,
        command=command,
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        model=model,
        revision=configuration.model.revision,
        grpc=endpoints.grpc,
        http=endpoints.http,
        admin=endpoints.admin,
        local=endpoints.local,
        tls=bool(configuration.security.tls_certificate),
        needs_key=bool(configuration.security.api_keys_file),
        log=log,
        models=[_describe(each) for each in system.models] if len(system.models) > 1 else [],
    )


def _describe(services: ModelServices) -> list[str]:
    model = services.configuration.model
    return [services.name, normalize(model.model), model.revision]


def _read(path: Path) -> Entry | None:
    try:
        return Entry(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
