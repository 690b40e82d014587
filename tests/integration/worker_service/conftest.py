from tests.unit.worker_service.conftest import fresh_worker, model, one_thread, socket_folder, worker

__all__ = ["fresh_worker", "model", "one_thread", "socket_folder", "worker"]
