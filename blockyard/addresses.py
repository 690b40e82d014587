"""Addresses as text: `host:port`, `[host]:port` for IPv6, and `unix:/path`."""

from __future__ import annotations

LOCALHOST = "127.0.0.1"


def join_address(host: str, port: int) -> str:
    """Writes an address; an IPv6 host may have its brackets or not."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_of(address: str) -> str:
    """Finds the host of an address, IPv6 in brackets; this machine's own for a Unix socket."""
    return LOCALHOST if address.startswith("unix:") else address.rpartition(":")[0]


def with_port(address: str, port: int) -> str:
    """Replaces an address's port; a Unix socket has none."""
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
