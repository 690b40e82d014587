from tests.unit.blockyard.conftest import fake_services, repository

__all__ = ["fake_services", "repository"]
