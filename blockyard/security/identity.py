"""A service's certificate, and the check of the other services' certificates.

Each service has a certificate with its name: `gateway.`, `scheduler.` or `worker.` plus the shared domain. Both ends of
a connection check the other's name, so that a worker's certificate can neither call workers nor act as the scheduler.
Without certificates the services trust anyone who reaches them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from blockyard.security.authentication import Gate, ServiceGate
from blockyard.security.exposure import is_loopback
from blockyard.security.tls import CertificateError, CertificateFiles, Peer, server_credentials
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from blockyard.configuration import InternalSecuritySettings

log = EventLogger(__name__)

ServiceName = Literal["gateway", "scheduler", "worker", "trainer"]


class InternalIdentity:
    """The certificate of a service. Without one, every method and property returns None."""

    def __init__(self, settings: InternalSecuritySettings) -> None:
        """Reads the files; raises CertificateError."""
        files = (settings.internal_certificate, settings.internal_key, settings.internal_authority)
        if any(files) and not all(files):
            raise CertificateError("--internal-certificate, --internal-key and --internal-authority go together")
        self.files = CertificateFiles(*files) if all(files) else None
        self._domain = settings.internal_domain

    def _name_of(self, service: ServiceName) -> str:
        return f"{service}.{self._domain}"

    def peer(self, service: ServiceName) -> Peer | None:
        """Returns the credentials and the expected name for a channel to a service."""
        return Peer(self.files, self._name_of(service)) if self.files else None

    def gate(self, caller: ServiceName, others: Mapping[str, ServiceName] = MappingProxyType({})) -> Gate | None:
        """Creates the gate that admits only one service. `others`: by method, a service that may call it instead."""
        if self.files is None:
            return None
        return ServiceGate(self._name_of(caller), {method: self._name_of(other) for method, other in others.items()})

    def credentials(self) -> grpc.ServerCredentials | None:
        return server_credentials(self.files) if self.files else None

    def warn_if_exposed(self, address: str) -> None:
        """Logs a warning if other machines can reach a port without certificates."""
        if self.files is None and not is_loopback(address):
            log.warning(
                "whoever reaches this port commands this service: see docs/guides/security.md",
                address=address,
                missing="--internal-certificate",
            )
