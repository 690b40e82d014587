"""What a scheduler's streams are held against: the ids of a sequence that runs alone, and no block held afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.values import GroupSpec, LoraSpec
from tests.kit.fakes.fake_loras import digest_of
from tests.kit.fakes.token_client import SEED
from tests.kit.oracles.model_worker import generate_alone
from tests.kit.waiting import until

if TYPE_CHECKING:
    from scheduler_service.server import Server

# Of the fake worker, unless it is told another.
VOCAB = 100


def oracle(
    prompt: list[int],
    max_tokens: int,
    n: int = 1,
    *,
    stop: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    lora_path: str = "",
) -> list[list[int]]:
    """The ids of each sequence, had it run alone; with the adapter in a folder, if there is one."""
    lora = LoraSpec(1, bytes.fromhex(digest_of(lora_path))) if lora_path else None
    spec = GroupSpec("", "", tuple(prompt), n, max_tokens, min_tokens, stop, lora=lora)
    return [
        generate_alone(spec, index, max_model_len=4096, vocab_size=VOCAB, seed_of=lambda _: SEED) for index in range(n)
    ]


async def until_idle(server: Server) -> None:
    """Waits until nothing runs and the worker has answered everything; then no block may be held."""

    def is_idle() -> bool:
        waits = len(server.service.backlog) + len(server.service.requests.live)
        return not waits and all(
            not (each.num_waiting + each.num_running + each.num_swapped + each.num_steps_in_flight)
            for each in server.service.stats()
        )

    await until(is_idle)
    for stats in server.service.stats():
        assert stats.num_free_device_blocks == stats.num_device_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
