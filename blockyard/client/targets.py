"""A client's gateways, the choice between them, and the metadata of every call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blockyard.channels import PUBLIC_MESSAGE_BYTES, Options, channel_options
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.headers import AUTHORIZATION_KEY, TENANT_KEY, TENANT_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_TARGET = "127.0.0.1:50051"
# grpc.health.v1 as raw bytes: an empty request asks about the whole server; these response bytes mean SERVING.
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
POLL_SECONDS = 0.1
# How long closing a client waits for its requests to be cancelled.
CANCEL_SECONDS = 1.0
# A kept request must be resumed within a minute: this detects a frozen gateway in a third of that.
_KEEPALIVE_SECONDS = 10.0
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
Metadata = tuple[tuple[str, str], ...]
_TENANT = re.compile(TENANT_PATTERN)
_API_KEY = re.compile(r"[!-~]{1,512}")


class Targets:
    """A client's gateways. Calls go to the current gateway until one of them fails.

    Args:
        targets: `host:port`, `unix:/path` or another gRPC target; several as a list, or in one text with commas.

    Raises ValueError if there is no target.
    """

    def __init__(self, targets: str | Sequence[str]) -> None:
        given = targets.split(",") if isinstance(targets, str) else targets
        self._targets = tuple(dict.fromkeys(target for each in given if (target := each.strip())))
        if not self._targets:
            raise ValueError("a client needs the address of a gateway")
        self._current = 0

    def __len__(self) -> int:
        return len(self._targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __str__(self) -> str:
        return ",".join(self._targets)

    @property
    def current(self) -> str:
        return self._targets[self._current]

    def on_failure(self, target: str) -> None:
        """Switches to the next gateway if `target`, which failed a call, is still the current one."""
        if target == self.current:
            self._current = (self._current + 1) % len(self._targets)

    def prefer(self, target: str) -> None:
        self._current = self._targets.index(target)


def client_channel_options(target: str) -> Options:
    """Returns a client channel's options; for a server on the same machine no proxy is used."""
    use_proxy = not target.startswith(_LOOPBACK)
    return channel_options(PUBLIC_MESSAGE_BYTES, keepalive_seconds=_KEEPALIVE_SECONDS, use_proxy=use_proxy)


def call_metadata(tenant: str, api_key: str = "") -> Metadata:
    """Returns a call's metadata: tenant and key, unless empty. Raises BlockyardError (FIELD_INVALID)."""
    if tenant and not _TENANT.fullmatch(tenant):
        raise invalid([Violation("tenant", f"must be 1 to 64 characters of A-Z a-z 0-9 . _ -, not {tenant!r:.100}")])
    if api_key and not _API_KEY.fullmatch(api_key):
        # Leave the key out of the text: errors are shown and logged.
        raise invalid([Violation("api_key", "is not made of visible ASCII characters")])
    headers = ((TENANT_KEY, tenant), (AUTHORIZATION_KEY, f"Bearer {api_key}" if api_key else ""))
    return tuple((name, value) for name, value in headers if value)


def make_never_ready_error(targets: Targets, cause: BlockyardError | None) -> BlockyardError:
    """Creates the error for a wait that ended before a gateway was ready."""
    problem = cause.message if cause else "it answers, and has no worker that takes requests"
    return BlockyardError(
        Reason.NO_READY_WORKER, f"{targets} is not ready: {problem}", metadata=cause.metadata if cause else {}
    )
