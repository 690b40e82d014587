"""API keys: the file that lists them by their hashes, and finding one.

Keys are 256 random bits, so that a plain SHA-256 hides them: there is nothing to guess. Knows nothing of calls.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import yaml

from blockyard.headers import TENANT_PATTERN
from blockyard.security.file_state import file_state
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = EventLogger(__name__)

PREFIX = "blockyard-"
# Stands for every tenant.
ANY_TENANT = "*"
# A file that has changed is noticed within this; to look at it takes some microseconds.
LOOK_SECONDS = 1.0
_HEAD = "# API keys of Blockyard, by their SHA-256. The gateway reads this again when it changes.\n"


class KeyFileError(Exception):
    """A file of keys cannot be used; the message says why."""


class KeyRole(StrEnum):
    USER = "user"
    ADMIN = "admin"
    MONITOR = "monitor"


class Key(pydantic.BaseModel):
    """One entry of the file.

    Attributes:
        name: of the entry, unique in the file. Logs have it.
        sha256: of the key, in hexadecimal.
        tenant: on whose behalf its calls are; `*`: on whose they say.
        role: user: the public APIs; admin: the admin API; monitor: metrics.
        expires: when it ends; None: never. Without a time zone it is UTC.
        max_calls: calls at once, at each gateway; 0: no limit.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, pydantic.Field(pattern=f"^{TENANT_PATTERN}$")]
    sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, pydantic.Field(pattern=rf"^(\*|{TENANT_PATTERN})$")]
    role: KeyRole = KeyRole.USER
    expires: datetime | None = None
    max_calls: Annotated[int, pydantic.Field(ge=0)] = 0

    @pydantic.field_validator("expires")
    @classmethod
    def _in_a_time_zone(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    def is_expired(self, now: float) -> bool:
        """Whether it has ended, at a time in seconds since 1970."""
        return self.expires is not None and now >= self.expires.timestamp()


_KEYS = pydantic.TypeAdapter(list[Key])


def make_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """Hashes a key as the file has it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def parse_keys(text: str) -> list[Key]:
    """Reads the content of a file of keys; raises KeyFileError."""
    try:
        content: Any = yaml.safe_load(text) or []
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise KeyFileError(f"not YAML: {' '.join(str(error).split())}") from None
    try:
        keys = _KEYS.validate_python(content)
    except pydantic.ValidationError as error:
        raise KeyFileError("; ".join(map(_describe, error.errors()))) from None
    for attribute in ("name", "sha256"):
        if repeated := _find_repeated(getattr(key, attribute) for key in keys):
            raise KeyFileError(f"two keys have the {attribute} {repeated}")
    return keys


def _describe(problem: Any) -> str:
    """Describes what is wrong and where, without the value: it may be a key that was put in the place of its hash."""
    place = ".".join(map(str, problem["loc"]))
    return f"{place or 'the file'}: {problem['msg']}"


def _find_repeated(values: Iterable[str]) -> str:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return ""


def read_keys(path: Path) -> list[Key]:
    """Reads a file of keys; raises KeyFileError."""
    try:
        return parse_keys(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def add_key(path: Path, key: Key) -> None:
    """Appends a key to a file, which is made for its owner alone; raises KeyFileError where the name is taken."""
    if any(known.name == key.name for known in (read_keys(path) if path.exists() else ())):
        raise KeyFileError(f"{path} has a key of the name {key.name}: choose another, or revoke that one first")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(("" if path.stat().st_size else _HEAD) + _to_yaml([key]))
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None


def revoke_key(path: Path, name: str) -> None:
    """Takes a key out of a file, which is written anew; raises KeyFileError where it is not there."""
    keys = read_keys(path)
    kept = [key for key in keys if key.name != name]
    if len(kept) == len(keys):
        raise KeyFileError(f"{path} has no key of the name {name}")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch(mode=0o600)
        beside.write_text(_HEAD + (_to_yaml(kept) if kept else ""), encoding="utf-8")
        # A gateway of another user has to be able to read on, or it would go on with the keys that it has.
        owner = path.stat()
        os.chown(beside, owner.st_uid, owner.st_gid)
        beside.chmod(stat.S_IMODE(owner.st_mode))
        beside.replace(path)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None


def _to_yaml(keys: list[Key]) -> str:
    entries = [key.model_dump(mode="json", exclude_defaults=True) | {"role": str(key.role)} for key in keys]
    return yaml.safe_dump(entries, sort_keys=False)


class KeyRing:
    """The keys of a file, read again when it changes. One that cannot be used then changes nothing but the log."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file; raises KeyFileError. `clock`: in seconds."""
        self._path = Path(path)
        self._clock = clock
        self._looked_at = clock()
        self._state = file_state(path)
        self._keys = self._read()

    def _read(self) -> dict[str, Key]:
        return {key.sha256: key for key in read_keys(self._path)}

    def find(self, secret: str) -> Key | None:
        """Finds the entry of a key; None where there is none. Expired ones are found too.

        What is looked up is a hash: the time that it takes reveals nothing of the keys.
        """
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._refresh()
        return self._keys.get(digest(secret))

    def _refresh(self) -> None:
        if (state := file_state(self._path)) == self._state:
            return
        self._state = state
        try:
            self._keys = self._read()
        except KeyFileError as error:
            log.error("the changed keys cannot be used, the last ones stay", error=error)
        else:
            log.info("took changed keys", num_keys=len(self._keys))
