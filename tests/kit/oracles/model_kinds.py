"""Models of every kind through whole processes: mixtures, layers with states, and checkpoints that come quantized.

Whatever happens to a worker, a request's answer is the one that it gives alone. As a program it tries all kinds;
`make test` has some of them.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.service.servers import internal_channel
from tests.kit.kernels.families import family_model
from tests.kit.kernels.quantized_models import quantized_model
from tests.kit.kernels.tiny_models import VOCAB_SIZE, save_tokenizer, tiny_model
from tests.kit.oracles import requests
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("w8a8", "w4a16", "awq", "gptq")
# Prompts come in pieces, and not all sequences have room at a time.
FLAGS = (
    *("--block-size", "16", "--max-model-len", "256", "--num-device-blocks", "26", "--num-host-blocks", "6"),
    *("--preemption-mode", "swap", "--max-prefill-chunk", "16", "--debug-integrity"),
)
_STATES = ("--num-host-blocks", "24", "--state-snapshot-tokens", "32")
RANKS = "_ranks"
DIES = {"worker": "step.after_answer:kill@30"}


def _with_tokenizer(name: str) -> Path:
    folder = family_model(name)
    save_tokenizer(folder)
    return folder


KINDS: dict[str, tuple[Callable[[], Path], tuple[str, ...]]] = {
    "qwen3_moe": (partial(_with_tokenizer, "qwen3_moe"), ()),
    # Of two KV groups.
    "gpt_oss": (partial(_with_tokenizer, "gpt_oss"), ("--num-device-blocks", "52", "--num-host-blocks", "12")),
    # With states, snapshots of them, and fixed blocks beside those of keys and values.
    **{
        name: (partial(_with_tokenizer, name), (*_STATES, "--num-device-blocks", str(num_blocks)))
        for name, num_blocks in {"qwen3_next": 40, "lfm2_moe": 34, "granite_hybrid": 56, "nemotron_h": 56}.items()
    },
    **{name: (lambda name=name: quantized_model("qwen2", name)[0], ()) for name in FORMATS},
    "int8": (partial(tiny_model, "llama"), ("--quantization", "int8", "--dtype", "bfloat16")),
    "int8_kv": (partial(tiny_model, "llama"), ("--kv-cache-dtype", "int8", "--dtype", "bfloat16")),
}
"""What makes the folder of each kind's model, and its settings."""


async def check_kind(kind: str, folder: Path) -> None:
    """Raises AssertionError where an answer depends on what runs beside it, a dead worker or a sleep.

    Args:
        kind: one of KINDS; with RANKS behind it, on two stages of two ranks.
        folder: for logs.
    """
    make_model, settings = KINDS[kind.removesuffix(RANKS)]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2} if kind.endswith(RANKS) else {}
    specs = requests.make_specs(VOCAB_SIZE, 8)
    with System(make_model(), folder, [*FLAGS, *settings], next_faults=dict(DIES), **sizes) as system:
        target = system.grpc_target
        answering = asyncio.create_task(requests.run(target, specs, concurrent=True))
        await asyncio.to_thread(system.services["worker"].wait)
        assert not answering.done()
        system.start_service("worker")
        after_a_death = await answering
        async with internal_channel(f"127.0.0.1:{system.port('admin')}") as channel:
            operator = admin_pb2_grpc.AdminServiceStub(channel)
            await operator.SleepReplica(admin_pb2.SleepReplicaRequest(replica="0", level=2))
            await operator.WakeReplica(admin_pb2.WakeReplicaRequest(replica="0", reload=True))
        after_a_sleep = await requests.run(target, specs, concurrent=True)
        assert scheduler_status(system).num_preemptions > 0
        alone = await requests.run(target, specs, concurrent=False)
    for number, truth in enumerate(alone):
        assert after_a_death[number] == truth, f"request {number}, after a death"
        assert after_a_sleep[number] == truth, f"request {number}, after a sleep"


if __name__ == "__main__":
    for kind in sys.argv[1:] or (*KINDS, *(f"{name}{RANKS}" for name in ("qwen3_next", "lfm2_moe", "granite_hybrid"))):
        with tempfile.TemporaryDirectory() as home:
            asyncio.run(check_kind(kind, Path(home)))
        print(kind, "gives the answers of running alone")  # noqa: T201
