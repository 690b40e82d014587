"""Decides who may call: one rule for every method of every listener, closed unless listed as open.

Owns that list, and the gates: by key, by a client's certificate, by a service's certificate. Knows neither how a call
shows what it has (`blockyard.service.interceptors` for gRPC, the gateway for HTTP) nor what is done for it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.headers import API_KEY_KEY, AUTHORIZATION_KEY, TENANT_PATTERN, X_API_KEY_KEY
from blockyard.security.keys import ANY_TENANT
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from contextlib import AbstractContextManager

    from blockyard.security.keys import Key, KeyRing, KeyRole

log = EventLogger(__name__)

# All that anybody may call: methods of gRPC and paths of HTTP, a star standing for any end. What is not here is closed.
OPEN = (
    "/grpc.health.v1.Health/*",
    "/health",
    "/health/*",
    # The page and what belongs to it; what it shows has to be asked for with a key.
    "/",
    "/page/*",
    "/favicon.ico",
)
# A key of any role opens these, and its limit of calls does not count here: operators must see a busy system.
MONITORING = ("/metrics", "/status")

REFUSALS_SECONDS = 10.0
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a call shows.

    Attributes:
        key: an API key.
        common_name: of the client's certificate, which the connection has verified.
        names: the alternative names in it.
    """

    key: str = ""
    common_name: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller, and the tenant of its calls; None: the tenant that each call names."""

    name: str = ""
    tenant: str | None = None


# The caller whose call this task answers.
CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


class Gate(Protocol):
    """Decides who may call."""

    def admit(self, credentials: Credentials, path: str) -> AbstractContextManager[Caller]:
        """Lets a call in, for as long as it runs; raises BlockyardError UNAUTHENTICATED or PERMISSION_DENIED."""
        ...


def find_key(headers: Mapping[str, str]) -> str:
    """Finds the API key among metadata or headers, whose names are in lower case; empty where there is none."""
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
        self._logged_at = -REFUSALS_SECONDS

    @staticmethod
    def is_open(path: str) -> bool:
        """Whether anybody may call a method of gRPC, or a path of HTTP."""
        return _matches(path, OPEN)

    @contextmanager
    def enter(self, credentials: Credentials, path: str) -> Generator[None]:
        """Lets a permitted call in and sets CALLER in its task; raises BlockyardError for others."""
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.admit(credentials, path))
            except BlockyardError as error:
                self._on_refusal(error, path)
                raise
            CALLER.set(caller)
            yield

    def _on_refusal(self, error: BlockyardError, path: str) -> None:
        """Logs refusals together, so that callers cannot fill the log."""
        self._num_refused += 1
        if time.monotonic() - self._logged_at >= REFUSALS_SECONDS:
            log.warning("refused calls", num_calls=self._num_refused, last=path, reason=error.message)
            self._logged_at, self._num_refused = time.monotonic(), 0


class KeyGate:
    """Lets in who has a key of a role."""

    def __init__(self, ring: KeyRing, role: KeyRole, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._ring = ring
        self._role = role
        self._clock = clock
        self._num_calls: Counter[str] = Counter()

    @contextmanager
    def admit(self, credentials: Credentials, path: str) -> Generator[Caller]:
        """Lets a call in. Raises BlockyardError, TENANT_QUOTA where the key has too many calls already."""
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
    """Lets in who has a certificate, which the connection has verified: its common name is the tenant.

    Args:
        names: only these common names; None: all.
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
    """Lets in one of our services, which its certificate names."""

    def __init__(self, name: str, names_by_path: Mapping[str, str] = MappingProxyType({})) -> None:
        """`name`: in the certificate, `gateway.blockyard`. `names_by_path`: of methods that another service calls."""
        self._name = name
        self._names_by_path = names_by_path

    @contextmanager
    def admit(self, credentials: Credentials, path: str) -> Generator[Caller]:
        name = self._names_by_path.get(path, self._name)
        if name not in credentials.names:
            message = f"only {name} may call here, not the holder of this certificate"
            raise BlockyardError(Reason.PERMISSION_DENIED, message)
        yield Caller(name)
