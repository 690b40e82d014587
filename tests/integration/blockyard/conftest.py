from tests.unit.blockyard.conftest import fake_services, gateway, repository

__all__ = ["fake_services", "gateway", "repository"]
