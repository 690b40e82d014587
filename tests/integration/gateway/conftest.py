from tests.unit.gateway.conftest import scheduler

__all__ = ["scheduler"]
