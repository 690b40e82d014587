"""A replica of two workers behind the real scheduler and gateway: what one of them dies of, no client sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.client import Client
from blockyard.contract.events import Delta
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

FLAGS = ["--max-model-len", "256", "--num-device-blocks", "64"]
WORKER_FLAGS = ["--num-threads", "1"]


def test_an_answer_goes_on_where_a_rank_dies(tmp_path: Path) -> None:
    options: GenerationOptions = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    replica = System(tiny_model("llama"), tmp_path, FLAGS, WORKER_FLAGS, tensor_parallel_size=2)
    with replica as system, Client(system.grpc_target) as client:
        expected = client.generate("one two three four", **options)
        num_deltas = 0
        with client.stream("one two three four", **options) as stream:
            for event in stream:
                num_deltas += isinstance(event, Delta)
                if num_deltas == 5 and isinstance(event, Delta):
                    system.services["worker1"].process.kill()
                    system.services["worker1"].wait()
                    system.start_service("worker1")
            answer = stream.result()
        assert answer.choices[0].token_ids == expected.choices[0].token_ids
        assert len(answer.choices[0].token_ids) == 64
        survivor = system.log("worker")
        assert survivor.count("model loaded") == 1, "the healthy rank loaded again"
        assert survivor.count("group formed") == 2
