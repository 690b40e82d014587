"""The extension that every worker has: it looks at weights, blocks, memory and the group.

Each operation takes a JSON object, whose fields are its arguments, and returns one; docs/guides/inspect.md lists them.
An operation that reads much is a generator, so that steps go on between its pieces.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from blockyard.contract.diagnostics import DIAGNOSTICS
from blockyard.contract.parallel import ALONE
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from worker_service.device import memory
from worker_service.operations.extensions import READABLE

if TYPE_CHECKING:
    from torch import Tensor

    from worker_service.models.loader import RunnableModel
    from worker_service.operations.extensions import Operation
    from worker_service.worker import Worker

Json = dict[str, Any]
DEFAULT_BUFFER_BYTES, MAX_BUFFER_BYTES = 1 << 26, 1 << 30
NUM_COPIES = 5
# Blocks of one piece: few, so that a step that waits for the piece is not late by much.
BLOCKS_OF_A_PIECE = 64


class Diagnostics:
    """Inspects one worker. Operations that read weights raise BlockyardError WRONG_STATE without loaded weights."""

    name = DIAGNOSTICS

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        operations: tuple[Callable[..., Any], ...] = (
            self.describe_model,
            self.check_numerics,
            self.weight_norms,
            self.measure_bandwidth,
            self.memory_summary,
            self.describe_group,
            self.collect_garbage,
        )
        self.operations: Mapping[str, Operation] = {each.__name__: _in_json(each) for each in operations}

    def describe_model(self) -> Json:
        """Describes the network, in lines: modules with shapes, layouts, cuts and bytes."""
        loaded = self._require_model()
        return {"text": loaded.model.describe(loaded.backend.name)}

    def check_numerics(self) -> Generator[None, None, Json]:
        """Looks for NaN and infinities in weights, and in the blocks of running sequences."""
        loaded, executor = self._require_model(), self._worker.set_up.executor
        num_tensors, strange = 0, list[Json]()
        for module in loaded.model.modules():
            for name, tensor in module.named_tensors():
                num_tensors += 1
                if not bool(tensor.isfinite().all()):
                    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                    strange.append({"name": name, "num_nans": nans, "num_infinities": infinities})
            yield
        strange_blocks: list[int] = []
        num_blocks = 0
        if executor is not None:
            pool, batch = executor.cache.device_pool.flatten(1), executor.batch
            # States are float32 whatever the model's dtype is.
            states = pool.view(torch.float32)
            for numbers, block_ids in ((pool, batch.filled_blocks()), (states, batch.filled_fixed_blocks())):
                num_blocks += len(block_ids)
                for first in range(0, len(block_ids), BLOCKS_OF_A_PIECE):
                    strange_blocks += _find_strange(numbers, block_ids[first : first + BLOCKS_OF_A_PIECE])
                    yield
        return {
            "num_tensors": num_tensors,
            "num_blocks": num_blocks,
            "tensors": strange,
            "device_block_ids": strange_blocks,
        }

    def weight_norms(self, names: Sequence[str] = ()) -> Generator[None, None, Json]:
        """Computes norm and largest magnitude of this rank's part of some tensors, or of all."""
        loaded, wanted = self._require_model(), frozenset(names)
        if unknown := sorted(wanted.difference(loaded.tensors)):
            raise invalid([Violation("names", f"the model has no tensor {name!r}") for name in unknown])
        weights: list[Json] = []
        for module in loaded.model.modules():
            if wanted and not wanted & module.tensor_names:
                continue
            for name, tensor in module.named_tensors():
                if not wanted or name in wanted:
                    wide = tensor.double()
                    norm, largest = float(wide.norm()), float(wide.abs().max()) if wide.numel() else 0.0
                    shape = list(tensor.shape)
                    weights.append({"name": name, "shape": shape, "norm": _number(norm), "largest": _number(largest)})
            yield
        return {"weights": weights}

    def measure_bandwidth(self, num_bytes: int = DEFAULT_BUFFER_BYTES) -> Generator[None, None, Json]:
        """Measures copies between buffers of `num_bytes`, in bytes per second: in the device's memory, and to it."""
        device = self._find_device()
        if not 0 < num_bytes <= MAX_BUFFER_BYTES:
            raise invalid([Violation("num_bytes", f"must be from 1 to {MAX_BUFFER_BYTES}, not {num_bytes}")])
        if 3 * num_bytes > memory.room_for_weights(device):
            raise BlockyardError(Reason.NEVER_FITS, f"there is no room for buffers of {num_bytes} bytes")
        ways: list[Json] = []
        for name, source, destination in _copies(device, num_bytes):
            ways.append({"name": name, "bytes_per_second": _measure_copy(source, destination)})
            yield
        return {"ways": ways}

    def memory_summary(self) -> Json:
        """Returns the memory use by purpose, in bytes."""
        device, set_up = self._find_device(), self._worker.set_up
        loaded, cache = set_up.loaded, set_up.cache
        on_gpu = device.type == "cuda"
        block_bytes = cache.cache_block_bytes if cache else 0
        return {
            "device_total_bytes": memory.total_bytes(device),
            "device_available_bytes": memory.room_for_weights(device),
            "process_bytes": psutil.Process().memory_info().rss,
            "weights_bytes": loaded.parameter_bytes if loaded else 0,
            "device_blocks_bytes": cache.num_device_blocks * block_bytes if cache else 0,
            "host_blocks_bytes": cache.num_host_blocks * block_bytes if cache else 0,
            "allocated_bytes": torch.cuda.memory_allocated(device) if on_gpu else 0,
            "reserved_bytes": torch.cuda.memory_reserved(device) if on_gpu else 0,
        }

    def describe_group(self) -> Json:
        """Returns the worker's place in its replica, and its group."""
        set_up, group = self._worker.set_up, self._worker.membership.info
        parallel = set_up.choice.parallel if set_up.choice else ALONE
        layers = set_up.loaded.model.share.layers if set_up.loaded else range(0)
        return {
            "rank": parallel.rank,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "epoch": group.epoch if group else 0,
            "problem": group.problem if group else "",
            "first_layer": layers.start,
            "num_layers": len(layers),
        }

    def collect_garbage(self) -> Json:
        """Runs Python's garbage collector, and returns allocators' cached memory to the system."""
        device, process = self._find_device(), psutil.Process()
        on_gpu = device.type == "cuda"
        before = process.memory_info().rss, torch.cuda.memory_reserved(device) if on_gpu else 0
        num_objects = gc.collect()
        memory.give_back(device)
        after = process.memory_info().rss, torch.cuda.memory_reserved(device) if on_gpu else 0
        freed_bytes, freed_device_bytes = (max(0, first - last) for first, last in zip(before, after, strict=True))
        return {"num_objects": num_objects, "freed_bytes": freed_bytes, "freed_device_bytes": freed_device_bytes}

    def _require_model(self) -> RunnableModel:
        self._worker.require(*READABLE)
        assert self._worker.set_up.loaded is not None
        return self._worker.set_up.loaded

    def _find_device(self) -> torch.device:
        assert self._worker.set_up.choice is not None
        return self._worker.set_up.choice.device


def _in_json(operation: Callable[..., Any]) -> Operation:
    """Wraps a function of JSON fields as an operation on bytes; raises BlockyardError FIELD_INVALID for others."""
    signature = inspect.signature(operation)

    def call(payload: bytes) -> Generator[None, None, bytes]:
        try:
            fields: Any = json.loads(payload or b"{}")
            bound = signature.bind(**fields)
        except (TypeError, ValueError) as error:
            problem = f"must be a JSON object of the operation's fields: {error}"
            raise invalid([Violation("payload", problem)]) from None
        for name, value in bound.arguments.items():
            _check_type(name, value, signature.parameters[name].default)
        result = operation(*bound.args, **bound.kwargs)
        if isinstance(result, Generator):
            result = yield from result
        return json.dumps(result).encode()

    return call


def _check_type(name: str, value: object, default: object) -> None:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise invalid([Violation(name, "must be a list of texts")])
    elif not isinstance(value, int):
        raise invalid([Violation(name, "must be a whole number")])


def _find_strange(numbers: Tensor, block_ids: list[int]) -> list[int]:
    """Finds the blocks with NaN or infinities. `numbers` [blocks, any]: the pool."""
    indices = torch.tensor(block_ids, dtype=torch.int64, device=numbers.device)
    is_finite = numbers.index_select(0, indices).isfinite().all(1)
    return [block for block, finite in zip(block_ids, is_finite.tolist(), strict=True) if not finite]


def _number(value: float) -> float | str:
    """Returns a number as JSON may hold it: one that is not finite becomes a text, as in protobuf's JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity"


def _copies(device: torch.device, num_bytes: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the measured copies: (name, source, destination)."""
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    yield "copy", here, torch.ones_like(here)
    if device.type == "cuda":
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        yield "host to device", host, here
        yield "device to host", here, host


def _measure_copy(source: Tensor, destination: Tensor) -> float:
    """Returns the bytes per second of the fastest of some copies."""
    fastest = math.inf
    for _ in range(NUM_COPIES):
        _synchronize(destination.device, source.device)
        begin = time.perf_counter()
        destination.copy_(source)
        _synchronize(destination.device, source.device)
        fastest = min(fastest, time.perf_counter() - begin)
    return source.nbytes / fastest


def _synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
