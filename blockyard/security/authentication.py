"""Authenticates callers by one rule for every method of every listener: closed unless listed as open.

Defines the list of open methods and the gates: by key, by client certificate, by service certificate. Reading
credentials from a call is up to `blockyard.service.interceptors` (gRPC) and the gateway (HTTP).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.headers import API_KEY_KEY, AUTHORIZATION_KEY, TENANT_PATTERN, X_API_KEY_KEY
from blockyard.security.keys import ANY_TENANT, Key, KeyRing, KeyRole
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping


log = EventLogger(__name__)

# gRPC methods and HTTP paths that need no credentials; a star matches any ending. All others are closed.
OPEN = (
    "/grpc.health.v1.Health/*",
    "/health",
    "/health/*",
    "/v2/health/*",
    # The page and its files; the data that it shows needs a key.
    "/",
    "/page/*",
    "/favicon.ico",
)
# A key of any role opens these paths and its limit of calls does not apply: operators must see a busy system.
MONITORING = ("/metrics", "/status")

REFUSALS_SECONDS = 10.0
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a call.

    Attributes:
        key: the API key; empty: none.
        common_name: the common name in the client's verified certificate; empty: no certificate.
        names: the alternative names in the certificate.
    """

    key: str = ""
    common_name: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `tenant`: of its calls; None: each call names its own tenant."""

    name: str = ""
    tenant: str | None = None


# The caller of the current task.
CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


class Gate(Protocol):
    """Decides whether a call is allowed."""

    def admit(self, credentials: Credentials, path: str) -> AbstractContextManager[Caller]:
        """Admits a call while the context is open; raises BlockyardError UNAUTHENTICATED or PERMISSION_DENIED."""
        ...


def find_key(headers: Mapping[str, str]) -> str:
    """Returns the API key in metadata or headers, whose names must be in lower case; empty if there is none."""
    value = headers.get(AUTHORIZATION_KEY, "")
    if value[: len(_SCHEME)].lower() == _SCHEME:
        return value[len(_SCHEME) :].strip()
    return headers.get(API_KEY_KEY, "") or headers.get(X_API_KEY_KEY, "")


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(path.startswith(each[:-1]) if each.endswith("*") else path == each for each in patterns)


class Authenticator:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._num_refused = 0
        self._logged_at = -math.inf

    @staticmethod
    def is_open(path: str) -> bool:
        """Returns whether a gRPC method or an HTTP path needs no credentials."""
        return _matches(path, OPEN)

    @contextmanager
    def enter(self, credentials: Credentials, path: str) -> Generator[None]:
        """Admits a permitted call and sets CALLER in its task; raises BlockyardError if it is not permitted."""
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.admit(credentials, path))
            except BlockyardError as error:
                self._on_refusal(error, path)
                raise
            CALLER.set(caller)
            yield

    def _on_refusal(self, error: BlockyardError, path: str) -> None:
        """Logs refusals at most every REFUSALS_SECONDS, so that callers cannot flood the log."""
        self._num_refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= REFUSALS_SECONDS:
            log.warning("refused calls", num_calls=self._num_refused, last=path, reason=error.message)
            self._logged_at, self._num_refused = now, 0


class KeyGate:
    """Admits callers that have a key with a given role."""

    def __init__(self, ring: KeyRing, role: KeyRole, clock: Callable[[], float] = time.time) -> None:
        """`clock`: returns seconds since 1970."""
        self._ring = ring
        self._role = role
        self._clock = clock
        self._num_calls: Counter[str] = Counter()

    @contextmanager
    def admit(self, credentials: Credentials, path: str) -> Generator[Caller]:
        """Admits a call. Raises BlockyardError, TENANT_QUOTA if the key has too many calls under way."""
        key = self._find(credentials.key)
        caller = Caller(key.name, None if key.tenant == ANY_TENANT else key.tenant)
        if _matches(path, MONITORING):
            yield caller
            return
        self._check(key)
        self._num_calls[key.name] += 1
        try:
            yield caller
        finally:
            self._num_calls[key.name] -= 1

    def _check(self, key: Key) -> None:
        if key.role is not self._role:
            raise BlockyardError(Reason.PERMISSION_DENIED, f"this key is of the role {key.role}, not {self._role}")
        if key.max_calls and self._num_calls[key.name] >= key.max_calls:
            message = f"this key has {key.max_calls} calls under way, which is its limit"
            raise BlockyardError(Reason.TENANT_QUOTA, message, retry_after_seconds=1.0)

    def _find(self, secret: str) -> Key:
        if not secret:
            raise BlockyardError(Reason.UNAUTHENTICATED, "a key is needed: send `authorization: Bearer KEY`")
        key = self._ring.find(secret)
        if key is None:
            raise BlockyardError(Reason.UNAUTHENTICATED, "this key is not known here")
        if key.is_expired(self._clock()):
            raise BlockyardError(Reason.UNAUTHENTICATED, f"the key {key.name} has expired")
        return key


class CertificateGate:
    """Admits callers that have a verified certificate; its common name is the tenant.

    Args:
        names: the allowed common names; None: all.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names

    @contextmanager
    def admit(self, credentials: Credentials, path: str) -> Generator[Caller]:
        name = credentials.common_name
        if not name:
            raise BlockyardError(Reason.UNAUTHENTICATED, "a client certificate with a common name is needed")
        if not re.fullmatch(TENANT_PATTERN, name):
            message = "the common name of the certificate is no tenant's name: 1 to 64 of [A-Za-z0-9._-]"
            raise BlockyardError(Reason.PERMISSION_DENIED, message)
        if self._names is not None and name not in self._names:
            raise BlockyardError(Reason.PERMISSION_DENIED, "this certificate is not one of an administrator")
        yield Caller(name, name)


class ServiceGate:
    """Admits a Blockyard service by the name in its certificate."""

    def __init__(self, name: str, names_by_path: Mapping[str, str] = MappingProxyType({})) -> None:
        """`name`: of the service, like `gateway.blockyard`. `names_by_path`: other callers of single methods."""
        self._name = name
        self._names_by_path = names_by_path

    @contextmanager
    def admit(self, credentials: Credentials, path: str) -> Generator[Caller]:
        name = self._names_by_path.get(path, self._name)
        if name not in credentials.names:
            message = f"only {name} may call here, not the holder of this certificate"
            raise BlockyardError(Reason.PERMISSION_DENIED, message)
        yield Caller(name)
