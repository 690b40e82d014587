"""Addresses as text: `host:port`, `[host]:port` for IPv6, and `unix:/path`."""

from __future__ import annotations

LOCALHOST = "127.0.0.1"


def join_address(host: str, port: int) -> str:
    """Returns `host:port`; an IPv6 host gets brackets if it has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host of an address, IPv6 in brackets; LOCALHOST for a Unix socket."""
    return LOCALHOST if address.startswith("unix:") else address.rpartition(":")[0]


def with_port(address: str, port: int) -> str:
    """Returns the address with another port; a Unix socket's address is returned unchanged."""
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
