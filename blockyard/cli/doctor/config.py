"""Settings of `blockyard doctor`: those of a system, and the services to check."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.configuration import InternalSecuritySettings, SystemConfiguration
from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class AddressSettings:
    """Addresses of the services to check."""

    scheduler_address: str = option("", "schedulers to ask: host:port or unix:/path, with commas between")
    worker_address: str = option("", "workers to ask: host:port or unix:/path, with commas or plus signs between")


@dataclass(frozen=True, slots=True)
class DoctorConfiguration(SystemConfiguration):
    """The settings of a system, and the services to check."""

    internal: InternalSecuritySettings = InternalSecuritySettings()
    addresses: AddressSettings = AddressSettings()
