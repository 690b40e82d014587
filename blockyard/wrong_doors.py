"""Explains a failed connection in plain words: the wrong port, TLS on one side only, or nobody there.

gRPC's own messages name parts of its library, and differ with its versions: what is not recognised stays as it is.
"""

from __future__ import annotations

import re

ADMIN_PORT = "the admin port (50052 unless --admin-port says otherwise)"
GRPC_PORT = "the gRPC port (50051 unless --grpc-port says otherwise)"
HTTP_PORT = "the HTTP port (8000 unless --http-port says otherwise)"

_PLACE = re.compile(
    r"last error: [A-Z_]+: (?:ipv4:|ipv6:)?(\S+?): (?:Failed to connect to remote host: )?(.*)", re.DOTALL
)
# What gRPC says, and what it means of the address that comes before.
_MEANINGS = (
    (
        re.compile(r"Trying to connect an http1\.x server"),
        f"answers in HTTP/1.1: use {GRPC_PORT}",
    ),
    (
        re.compile(r"missing selected ALPN property"),
        f"speaks TLS but not gRPC, as an HTTP port does: use {GRPC_PORT}",
    ),
    (re.compile(r"WRONG_VERSION_NUMBER"), "speaks no TLS: connect without it (no --tls, no tls=True)"),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|unable to get local issuer|self.signed certificate"),
        "shows a certificate that no known authority has signed: name the authority (--tls-authority, ClientTls)",
    ),
    (
        re.compile(r"is not verified for|Hostname Verification Check failed|Peer name .* is not in peer certificate"),
        "shows a certificate of another name: say which is expected (--tls-server-name, ClientTls)",
    ),
)
_CLOSED = re.compile(r"UNAVAILABLE: \S+: (Socket closed|recvmsg:Connection reset by peer)")
# Of HTTP: what stands behind an address there.
GRPC_AT_HTTP = f"answers in gRPC: use {HTTP_PORT}"
HTTPS_PERHAPS = "closed the connection without an answer, as a server that asks for TLS does: try https://"
NO_HTTPS = "speaks no TLS: use http:// instead of https://"
_TLS_PERHAPS = "closed the connection at once, as a server that asks for TLS does: try --tls (tls=True)"


def explain_failure(details: str) -> str:
    """Translates the details of a call that reached no service of ours."""
    if details == "Method not found!":
        return "the server at this address has no such method: it is another service, or an older version"
    place = _PLACE.search(details)
    if place is None:
        return details
    address, cause = place.groups()
    for pattern, meaning in _MEANINGS:
        if pattern.search(details):
            return f"{address} {meaning}"
    if _CLOSED.search(details):
        return f"{address} {_TLS_PERHAPS}"
    return f"failed to connect to {address}: {cause}"


def is_wrong_door(message: str) -> bool:
    """Whether a message of `explain_failure` says that somebody else answers there."""
    meanings = [meaning for _, meaning in _MEANINGS]
    return message.endswith((*meanings, _TLS_PERHAPS, GRPC_AT_HTTP, HTTPS_PERHAPS, NO_HTTPS))
