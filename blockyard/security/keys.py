"""API keys: reads and changes the file that lists them by their hashes, and looks keys up.

Keys have 256 random bits, so a plain SHA-256 is enough: they cannot be guessed.
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
# A tenant that stands for every tenant.
ANY_TENANT = "*"
# How often the file is checked for changes; a check takes some microseconds.
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
        name: the entry's name, unique in the file; it appears in logs.
        sha256: the key's SHA-256 in hexadecimal.
        tenant: the tenant of the key's calls; `*`: each call names its tenant.
        role: user: the public APIs; admin: the admin API; monitor: metrics.
        expires: when the key expires; None: never. Without a time zone it is UTC.
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
        """Returns whether the key has expired. `now`: seconds since 1970."""
        return self.expires is not None and now >= self.expires.timestamp()


_KEYS = pydantic.TypeAdapter(list[Key])


def make_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    """Returns the SHA-256 of a key as in the file."""
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
    """Describes a problem and its place without the value, which may be a key in place of its hash."""
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
    """Appends a key to a file, created readable by its owner only; raises KeyFileError if the name is taken."""
    if any(known.name == key.name for known in (read_keys(path) if path.exists() else ())):
        raise KeyFileError(f"{path} has a key of the name {key.name}: choose another, or revoke that one first")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(("" if path.stat().st_size else _HEAD) + _to_yaml([key]))
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None


def revoke_key(path: Path, name: str) -> None:
    """Removes a key and rewrites the file; raises KeyFileError if there is no such key."""
    keys = read_keys(path)
    kept = [key for key in keys if key.name != name]
    if len(kept) == len(keys):
        raise KeyFileError(f"{path} has no key of the name {name}")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch(mode=0o600)
        beside.write_text(_HEAD + (_to_yaml(kept) if kept else ""), encoding="utf-8")
        # Keep owner and mode: a gateway of another user must be able to read the file, or it keeps the old keys.
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
    """The keys of a file, read again when it changes. A changed file that is invalid is logged and ignored."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file; raises KeyFileError. `clock`: returns monotonic seconds."""
        self._path = Path(path)
        self._clock = clock
        self._looked_at = clock()
        self._state = file_state(path)
        self._keys = self._read()

    def _read(self) -> dict[str, Key]:
        return {key.sha256: key for key in read_keys(self._path)}

    def find(self, secret: str) -> Key | None:
        """Finds the entry of a key, expired or not; None if there is none.

        Looks up the key's hash, so that the time taken reveals nothing about the keys.
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
