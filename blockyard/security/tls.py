"""Certificates of gRPC and HTTP servers and channels, read again when their files change.

Reads PEM files. Each handshake uses the current files; existing connections keep the certificates that they began with.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc

from blockyard.security.file_state import FileState, file_state
from blockyard.telemetry import EventLogger

log = EventLogger(__name__)


class CertificateError(Exception):
    """A certificate cannot be used; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files at one time.

    Attributes:
        chain: PEM, the certificate first.
        key: PEM of the private key, without a passphrase.
        authority: PEM of the trusted authorities; empty if peers need no certificate.
        context: the same certificates for an HTTP server.
        version: increases with each change of the files.
    """

    chain: bytes
    key: bytes
    authority: bytes
    context: ssl.SSLContext
    version: int


class CertificateFiles:
    """A certificate, its key and an authority in files, read again when they change. May be used by many threads.

    A changed file that is invalid is logged and ignored.
    """

    def __init__(self, chain: str, key: str, authority: str = "") -> None:
        """Reads the PEM files at these paths; empty `authority`: none. Raises CertificateError."""
        self._paths = (chain, key, authority)
        self._lock = threading.Lock()
        self._states = self._look()
        self._current = self._read(version=1)

    @property
    def chain_path(self) -> str:
        return self._paths[0]

    @property
    def verifies(self) -> bool:
        """Whether clients must present a certificate."""
        return bool(self._paths[2])

    def current(self) -> Certificates:
        """Returns the current certificates, reading changed files again."""
        with self._lock:
            # Take the state before reading, so that a change in between is noticed next time.
            if (states := self._look()) != self._states:
                self._states = states
                self._reload()
            return self._current

    def _reload(self) -> None:
        try:
            self._current = self._read(self._current.version + 1)
        except CertificateError as error:
            log.warning("a changed certificate cannot be used, the last one stays", error=error)
        else:
            log.info("took a changed certificate", certificate=self._paths[0])

    def _look(self) -> list[FileState | None]:
        return [file_state(path) for path in self._paths if path]

    def _read(self, version: int) -> Certificates:
        chain, key, authority = (_content(path) if path else b"" for path in self._paths)
        return Certificates(chain, key, authority, _make_context(*self._paths), version)


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None


def _make_context(chain: str, key: str, authority: str) -> ssl.SSLContext:
    """Creates an HTTP server's TLS context; raises CertificateError if key and certificate do not match."""
    context = _bare_context()
    # A resumed session would skip the check of the client's certificate, even after the authority changed.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        context.load_cert_chain(chain, key, _no_passphrase)
    except (ssl.SSLError, OSError) as error:
        raise CertificateError(f"{chain} and {key} are no certificate with its key: {_describe(error)}") from None
    if authority:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(authority)
        except (ssl.SSLError, OSError) as error:
            raise CertificateError(f"{authority} has no certificate of an authority: {_describe(error)}") from None
    return context


def _describe(error: OSError) -> str:
    return error.strerror or str(error) or "no certificate in it"


def _no_passphrase() -> NoReturn:
    """Replaces OpenSSL's passphrase prompt, on which a service would wait for ever."""
    raise CertificateError("a key with a passphrase cannot be used")


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Creates a gRPC server's credentials. Clients must present a certificate if the files have an authority."""
    first = files.current()
    last = [first.version]

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Returns a changed configuration, or None. gRPC calls it in each handshake, on its own thread."""
        now = files.current()
        if now.version == last[0]:
            return None
        last[0] = now.version
        return _make_configuration(now)

    # The published type stubs do not allow the fetcher to return None.
    return grpc.dynamic_ssl_server_credentials(_make_configuration(first), cast("Any", fetch), files.verifies)


def _make_configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], certificates.authority or None)


def http_context(files: CertificateFiles) -> ssl.SSLContext:
    """Creates the TLS context that an HTTP server listens with."""
    context = files.current().context

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Selects the current context. Called in each handshake, also without a server name."""
        connection.context = files.current().context

    # Use a separate context: the contexts to choose from must not have this callback.
    front = _make_context_like(context)
    front.sni_callback = choose
    return front


def _make_context_like(context: ssl.SSLContext) -> ssl.SSLContext:
    front = _bare_context()
    front.verify_mode, front.options, front.num_tickets = context.verify_mode, context.options, context.num_tickets
    return front


def _bare_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Debian's Python leaves the versions to OpenSSL's configuration.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def peer_names(auth_context: dict[str, list[bytes]]) -> tuple[str, ...]:
    """Returns the alternative names in a client's certificate from gRPC's context; empty without a certificate."""
    names = auth_context.get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace") for name in names)


def peer_common_name(auth_context: dict[str, list[bytes]]) -> str:
    """Returns the common name in a client's certificate from gRPC's context; empty without a certificate."""
    names = auth_context.get("x509_common_name", ())
    return names[0].decode("utf-8", "replace") if names else ""


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer of an outgoing connection: this process's certificate files, and the peer's expected name."""

    files: CertificateFiles
    name: str

    def credentials(self) -> grpc.ChannelCredentials:
        now = self.files.current()
        return grpc.ssl_channel_credentials(now.authority, now.key, now.chain)
