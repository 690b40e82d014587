from tests.unit.scheduler_service.conftest import configuration, harness, settings

__all__ = ["configuration", "harness", "settings"]
