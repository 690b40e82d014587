"""A replica of two workers behind the real scheduler and gateway: what one of them dies of, no client sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.client import Client
from blockyard.client.results import Delta
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import Service, System

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

FLAGS = ["--tensor-parallel-size", "2", "--max-model-len", "256", "--num-device-blocks", "64"]


class RankSystem(System):
    """One of whose replica's ranks each is a process; `ranks` holds them."""

    @property
    def worker_address(self) -> str:
        """Where the ranks listen."""
        return "+".join(map(self._address, (0, 1)))

    def _address(self, rank: int) -> str:
        return f"unix:{self._sockets.name}/w{rank}"

    def start_service(self, name: str) -> Service:
        """Starts a service, and both ranks for a worker."""
        if name != "worker":
            return super().start_service(name)
        self.start_rank(1)
        return self.start_rank(0)

    def start_rank(self, rank: int) -> Service:
        """Starts a rank, again if it has died."""
        name = "worker" if rank == 0 else f"worker{rank}"
        number = len(list(self.folder.glob(f"{name}-*.log")))
        flags = ["--worker-address", self._address(rank), "--worker-device", "cpu", "--num-threads", "1"]
        service = Service("worker_service", flags, self.folder / f"{name}-{number}.log")
        self.services[name] = service
        return service

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self.services["worker1"].stop()


def test_an_answer_goes_on_where_a_rank_dies(tmp_path: Path) -> None:
    options: GenerationOptions = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    with RankSystem(tiny_model("llama"), tmp_path, FLAGS) as system, Client(system.grpc_target) as client:
        expected = client.generate("one two three four", **options)
        num_deltas = 0
        with client.stream("one two three four", **options) as stream:
            for event in stream:
                num_deltas += isinstance(event, Delta)
                if num_deltas == 5 and isinstance(event, Delta):
                    system.services["worker1"].process.kill()
                    system.services["worker1"].wait()
                    system.start_rank(1)
            answer = stream.result()
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        assert len(answer.choices[0].token_ids) == 64
        survivor = system.log("worker-")
        assert survivor.count("model loaded") == 1, "the healthy rank loaded again"
        assert survivor.count("group formed") == 2
