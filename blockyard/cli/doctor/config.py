"""What `blockyard doctor` is told: the settings of a system, and which services to ask."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.configuration import InternalSecuritySettings, SystemConfiguration
from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class AddressSettings:
    """Services to ask."""

    scheduler_address: str = option("", "schedulers to ask: host:port or unix:/path, with commas between")
    worker_address: str = option("", "workers to ask: host:port or unix:/path, with commas or plus signs between")


@dataclass(frozen=True, slots=True)
class DoctorConfiguration(SystemConfiguration):
    """The settings of a system, and the services around it."""

    internal: InternalSecuritySettings = InternalSecuritySettings()
    addresses: AddressSettings = AddressSettings()
