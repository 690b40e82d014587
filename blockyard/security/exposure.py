"""Checks whether other machines can reach an address, and refuses an admin API that is open to them."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from blockyard.settings import SettingsError

if TYPE_CHECKING:
    from blockyard.configuration import PublicSettings, SecuritySettings


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach a host, `host:port` or `unix:/path`; False for unknown names."""
    if address.startswith("unix:") or address.partition(":")[0] == "localhost":
        return True
    for host in (address, address.rpartition(":")[0]):
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            continue
    return False


def check_admin(public: PublicSettings, security: SecuritySettings) -> None:
    """Refuses an admin API that other machines could use without a key: raises SettingsError."""
    if is_loopback(public.admin_host) or security.api_keys_file or security.tls_client_authority:
        return
    raise SettingsError(
        f"--admin-host {public.admin_host} would let every machine that reaches it drain, profile and change this "
        "system: give --api-keys-file (or --tls-client-authority and --tls-admin-names), or leave it on 127.0.0.1"
    )
