"""The calls that have a worker read, keep and forget adapters.

Every failure leaves here as a BlockyardError that names the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.codec.worker_info import ADAPTER
from blockyard.errors import BlockyardError
from blockyard.worker.v1 import worker_pb2
from scheduler_service.replicas.steps.answer_checks import check_adapter, require

if TYPE_CHECKING:
    from blockyard.contract.scheduling import Adapter
    from scheduler_service.replicas.rank import Rank

# Enough for gigabytes from a disk or over a network.
LOAD_SECONDS = 120.0
CALL_SECONDS = 5.0


async def _call(rank: Rank, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
    try:
        return await rank.link.call(method, request, seconds)
    except BlockyardError as error:
        message = f"the worker at {rank.address}: {error.message}"
        raise BlockyardError(error.reason, message, error.violations, error.retry_after_seconds) from None


async def add_lora(rank: Rank, adapter: Adapter) -> Adapter:
    """Has a worker read an adapter into its cache, and returns what it found."""
    request = worker_pb2.AddLoraRequest(lora_id=adapter.lora_id, name=adapter.name, path=adapter.path)
    found = check_adapter(ADAPTER.decode((await _call(rank, "AddLora", request, LOAD_SECONDS)).adapter))
    require(found.lora_id == adapter.lora_id, f"adapter {found.lora_id} and not {adapter.lora_id}")
    return found


async def list_loras(rank: Rank) -> dict[int, bool]:
    """Asks for the adapters that a worker has or is reading, and whether they are pinned."""
    answer = await _call(rank, "ListLoras", worker_pb2.ListLorasRequest(), LOAD_SECONDS)
    return dict.fromkeys(answer.reading_lora_ids, False) | {each.lora_id: each.pinned for each in answer.adapters}


async def remove_lora(rank: Rank, lora_id: int) -> None:
    await _call(rank, "RemoveLora", worker_pb2.RemoveLoraRequest(lora_id=lora_id))


async def pin_lora(rank: Rank, lora_id: int, *, pinned: bool) -> None:
    await _call(rank, "PinLora", worker_pb2.PinLoraRequest(lora_id=lora_id, pinned=pinned))
