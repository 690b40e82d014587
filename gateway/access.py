"""Prepares TLS and the checks of keys and certificates for the gateway's listeners, from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.clock import SYSTEM, Clock
from blockyard.security.authentication import CertificateGate, Gate, KeyGate
from blockyard.security.exposure import is_loopback
from blockyard.security.keys import KeyRing, KeyRole
from blockyard.security.tls import CertificateError, CertificateFiles, server_credentials
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    import grpc

    from blockyard.configuration import SecuritySettings

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """The requirements for clients of the gateway.

    Attributes:
        files: the files of the gateway's certificate; None: no TLS.
        api, admin: the gates of the public APIs and of the admin API; None: all callers are admitted.
        max_connections: the most connections at once on each port; 0: no limit.
    """

    files: CertificateFiles | None = None
    api: Gate | None = None
    admin: Gate | None = None
    max_connections: int = 0

    def credentials(self) -> grpc.ServerCredentials | None:
        """Makes the credentials for binding a gRPC port; None without TLS."""
        return server_credentials(self.files) if self.files else None

    def warn_if_exposed(self, host: str) -> None:
        """Logs a warning if other machines can reach an address that is not protected by keys and TLS."""
        missing = [
            name
            for name, is_there in (("--api-keys-file", self.api), ("--tls-certificate", self.files))
            if is_there is None
        ]
        if missing and not is_loopback(host):
            log.warning(
                "other machines can reach this gateway, which is not protected: see docs/guides/security.md",
                host=host,
                missing=" ".join(missing),
            )


def make_access(settings: SecuritySettings, clock: Clock = SYSTEM) -> Access:
    """Reads the files that the settings name; raises CertificateError or KeyFileError."""
    ring = KeyRing(settings.api_keys_file, clock.monotonic) if settings.api_keys_file else None
    files = _certificate_files(settings)
    api: Gate | None = None
    admin: Gate | None = None
    if ring is not None:
        api, admin = KeyGate(ring, KeyRole.USER, clock.time), KeyGate(ring, KeyRole.ADMIN, clock.time)
    elif files is not None and files.verifies:
        names = frozenset(name.strip() for name in settings.tls_admin_names.split(",") if name.strip())
        api, admin = CertificateGate(), CertificateGate(names)
    return Access(files, api, admin, settings.max_connections)


def _certificate_files(settings: SecuritySettings) -> CertificateFiles | None:
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        raise CertificateError("--tls-certificate and --tls-key go together")
    if settings.tls_certificate:
        return CertificateFiles(settings.tls_certificate, settings.tls_key, settings.tls_client_authority)
    if settings.tls_client_authority:
        raise CertificateError("--tls-client-authority needs --tls-certificate and --tls-key")
    return None
