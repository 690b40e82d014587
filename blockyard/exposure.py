"""Whether others than this machine can reach an address."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a host, `host:port` or `unix:/path`. A name is taken for reachable."""
    if address.startswith("unix:") or address.partition(":")[0] == "localhost":
        return True
    for host in (address, address.rpartition(":")[0]):
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            continue
    return False
