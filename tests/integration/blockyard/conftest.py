from tests.unit.blockyard.conftest import fake_services

__all__ = ["fake_services"]
