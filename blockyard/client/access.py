"""A client's credentials (tenant, key and TLS), and the channels that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from blockyard.client.targets import Metadata, call_metadata, client_channel_options
from blockyard.security.tls import CertificateError
from blockyard.transport import GRPC

if TYPE_CHECKING:
    from blockyard.channels import Options
    from blockyard.transport import Transport


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a client's connections.

    Attributes:
        authority: PEM file of the authority that signed the server's certificate; empty: gRPC's default authorities.
        certificate, key: PEM files, for a server that asks for a certificate.
        server_name: expected in the server's certificate; empty: the host of the address.
    """

    authority: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""


class ClientAccess:
    """A client's credentials, and the channels that carry them. By default no credentials and no TLS."""

    def __init__(
        self, tenant: str = "", api_key: str = "", tls: ClientTls | bool = False, transport: Transport = GRPC
    ) -> None:
        """Reads the files of `tls`; True: TLS with gRPC's default authorities. `transport`: opens aio channels.

        Raises CertificateError, and BlockyardError (FIELD_INVALID) for a malformed tenant or key.
        """
        self.metadata: Metadata = call_metadata(tenant, api_key)
        chosen = ClientTls() if tls is True else tls or None
        self._server_name = chosen.server_name if chosen else ""
        self._credentials = _credentials(chosen) if chosen else None
        self._transport = transport

    def make_channel(self, target: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, self._options(target))
        return grpc.secure_channel(target, self._credentials, self._options(target))

    def make_aio_channel(self, target: str) -> grpc.aio.Channel:
        return self._transport.channel(target, self._options(target), self._credentials)

    def _options(self, target: str) -> Options:
        named = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return [*client_channel_options(target), *named]


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    if bool(tls.certificate) != bool(tls.key):
        raise CertificateError("a client's certificate and its key go together")
    return grpc.ssl_channel_credentials(_content(tls.authority), _content(tls.key), _content(tls.certificate))


def _content(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from None
