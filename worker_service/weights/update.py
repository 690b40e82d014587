"""One live update of the weights: the expected tensors, their order, and their bytes as they arrive.

The event loop queues complete tensors, at most a few ahead; the device thread reads them like tensors of a file. Knows
no messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import queue
import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.errors import BlockyardError, Reason, Violation
from blockyard_kernels.cpu.huge_pages import HUGE_PAGE_BYTES, allocate_huge
from worker_service.models.sharded_files import list_share
from worker_service.models.weight_files import STORED_DTYPES, Numbers, sample_digest, weights_digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from blockyard.contract.workers import CacheInfo
    from worker_service.models.loader import RunnableModel

MIN_TICKET_BYTES = 16
MAX_VIOLATIONS = 20
MAX_NAMES = 5
# Complete tensors that may wait for the device thread while the next tensor arrives.
NUM_STAGED = 2


@dataclass(frozen=True, slots=True)
class TensorHead:
    """The metadata of a tensor, with a `sha256` (empty: none) or a `crc32`. `stored_dtype` is safetensors' name.

    `sample_sha256`: see `sample_digest`; empty: not given.
    """

    name: str
    stored_dtype: str
    shape: tuple[int, ...]
    sha256: bytes = b""
    crc32: int | None = None
    sample_sha256: bytes = b""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.stored_dtype].itemsize


def order_heads(loaded: RunnableModel, heads: Sequence[TensorHead]) -> list[int]:
    """Returns the indices of the heads whose tensors this rank receives, in the order in which it reads them.

    It also receives tensors of other pipeline stages, unless all of these have a `sample_sha256`.
    """
    places = {head.name: index for index, head in enumerate(heads)}
    names = tensor_names(loaded)
    share = list_share(loaded.config, names, loaded.parallel)
    others = set(names).difference(share)
    is_enough = all(heads[places[name]].sample_sha256 for name in others)
    return [places[name] for name in (share if is_enough else names)]


def tensor_names(loaded: RunnableModel) -> list[str]:
    """Lists the tensors that an update must have, in the order in which the model's tensors are read."""
    head = f"{loaded.model.names.head}.weight"
    return [name for name in loaded.tensors if not (loaded.config.head.is_tied and name == head)]


def wrong_heads(loaded: RunnableModel, heads: Sequence[TensorHead]) -> list[Violation]:
    """Returns the reasons why these tensors cannot be the model's weights; empty if they can."""
    if loaded.model.has_two_tables:
        return [Violation("tensors", "this model holds two tables that its config.json ties: reload it from a folder")]
    if loaded.config.stored is not None:
        return [Violation("tensors", "this model's checkpoint is quantized: reload it from a folder")]
    return list(_wrong_heads(loaded, heads))[:MAX_VIOLATIONS]


def _wrong_heads(loaded: RunnableModel, heads: Sequence[TensorHead]) -> Iterator[Violation]:
    names, found = tensor_names(loaded), {head.name: head for head in heads}
    table, tied = f"{loaded.model.names.embedding}.weight", f"{loaded.model.names.head}.weight"
    if len(found) < len(heads):
        yield Violation("tensors", "a name is given twice")
    for name in names:
        if name not in found:
            yield Violation("tensors", f"{name} is missing")
    for index, head in enumerate(heads):
        field = f"tensors[{index}]"
        if head.name == tied and tied not in names and table in found:
            if (head.sha256, head.crc32) != (found[table].sha256, found[table].crc32):
                yield Violation(field, f"{tied} differs from {table}, and the model ties them")
            continue
        if head.name not in names:
            yield Violation(field, f"the model has no {head.name}")
        elif head.shape != loaded.tensors[head.name]:
            yield Violation(field, f"{head.name} has shape {list(head.shape)}, not {list(loaded.tensors[head.name])}")
        if head.stored_dtype not in STORED_DTYPES:
            yield Violation(field, f"{head.name} is {head.stored_dtype}: supported are {', '.join(STORED_DTYPES)}")
        if len(head.sha256) != hashlib.sha256().digest_size and (head.sha256 or head.crc32 is None):
            yield Violation(field, f"{head.name} has neither SHA-256 nor CRC-32")
        if len(head.sample_sha256) not in (0, hashlib.sha256().digest_size):
            yield Violation(field, f"{head.name} has a sample_sha256 that is no SHA-256")


class _Arrival:
    """A tensor that arrives in pieces. Each piece is hashed while it is in the processor's cache."""

    def __init__(self, head: TensorHead, room: npt.NDArray[np.uint8]) -> None:
        self._head = head
        self._room = room
        self._content = room.data
        self._num_bytes = 0
        self._sha256 = hashlib.sha256() if head.sha256 else None
        self._crc32 = 0

    @property
    def is_whole(self) -> bool:
        return self._num_bytes == self._head.num_bytes

    def add(self, piece: bytes) -> None:
        """Adds the next bytes; raises BlockyardError FIELD_INVALID if there are too many."""
        end = self._num_bytes + len(piece)
        if end > self._head.num_bytes:
            raise BlockyardError(Reason.FIELD_INVALID, f"{self._head.name} has more than {self._head.num_bytes} bytes")
        self._content[self._num_bytes : end] = piece
        self._num_bytes = end
        self._crc32 = zlib.crc32(piece, self._crc32)
        if self._sha256 is not None:
            self._sha256.update(piece)

    def finish(self) -> Tensor:
        """Returns the tensor; raises BlockyardError FIELD_INVALID if its bytes do not match the checksum."""
        if self._sha256 is not None and self._sha256.digest() != self._head.sha256:
            raise BlockyardError(Reason.FIELD_INVALID, f"{self._head.name} is damaged: the SHA-256 differs")
        if self._head.crc32 not in (None, self._crc32):
            raise BlockyardError(Reason.FIELD_INVALID, f"{self._head.name} is damaged: the CRC-32 differs")
        return torch.from_numpy(self._room).view(STORED_DTYPES[self._head.stored_dtype]).view(self._head.shape)


class _Rooms:
    """Memory for arriving tensors, which is allocated once and reused.

    Allocating fresh pages for each tensor, which the system must clear, would take longer than packing the tensor.
    """

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns bytes [num_bytes]; they are reused when no reference to them or to a tensor made of them is left."""
        if num_bytes < HUGE_PAGE_BYTES:
            return np.empty(num_bytes, np.uint8)
        fitting = [room for room in self._free if len(room) >= num_bytes]
        whole = min(fitting, key=len, default=None)
        if whole is None:
            whole = allocate_huge(num_bytes).numpy()
        else:
            self._free[:] = [room for room in self._free if room is not whole]
        part = whole[:num_bytes]
        weakref.finalize(part, self._free.append, whole).atexit = False
        return part


class WeightUpdate:
    """The tensors of one update. Same interface as `WeightFiles`, for the device thread."""

    def __init__(
        self, version: str, ticket: bytes, heads: Sequence[TensorHead], order: Sequence[int], names: Sequence[str]
    ) -> None:
        """`order`: indices of the heads whose tensors are sent; `names`: names of all tensors of the model."""
        self.version = version
        self.num_bytes = 0
        self.num_tensors = 0
        # The model that the device thread has made, once all tensors have arrived.
        self.renewed: tuple[RunnableModel, CacheInfo] | None = None
        self.is_over = asyncio.Event()
        self._ticket: bytes | None = ticket
        self._heads, self._order = heads, order
        self._names = frozenset(names)
        # The digests of tensors that are not sent come from their heads.
        missing = self._names.difference(heads[index].name for index in order)
        self._digests = {head.name: head.sample_sha256 for head in heads if head.name in missing}
        self._tensors: queue.SimpleQueue[tuple[TensorHead, Tensor] | Exception] = queue.SimpleQueue()
        self._rooms = _Rooms()
        self._room = asyncio.Semaphore(NUM_STAGED)
        self._loop = asyncio.get_running_loop()

    @property
    def is_used(self) -> bool:
        return self._ticket is None

    def use(self, ticket: bytes) -> None:
        """Uses the ticket, which is valid once; raises BlockyardError PERMISSION_DENIED for another ticket."""
        if self._ticket is None or ticket != self._ticket:
            raise BlockyardError(
                Reason.PERMISSION_DENIED, "the ticket is not that of the update, or it was used already"
            )
        self._ticket = None

    def require_whole(self) -> None:
        """Raises BlockyardError WRONG_STATE, which names the missing tensors, if the update was interrupted."""
        if self.renewed is None:
            missing = [self._heads[index].name for index in self._order[self.num_tensors :]]
            some = ", ".join(missing[:MAX_NAMES]) + (", ..." if len(missing) > MAX_NAMES else "")
            raise BlockyardError(
                Reason.WRONG_STATE,
                f"the update to {self.version} was interrupted: {len(missing)} tensors are missing ({some}); "
                "update again, or reload the weights",
            )

    # The event loop's side.

    async def feed(self, pieces: AsyncIterator[tuple[int, bytes]]) -> None:
        """Receives pieces until all tensors are complete; raises BlockyardError FIELD_INVALID for a wrong piece."""
        for index in self._order:
            head = self._heads[index]
            await self._room.acquire()
            arrival = _Arrival(head, self._rooms.take(head.num_bytes))
            while not arrival.is_whole:
                piece = await anext(pieces, None)
                if piece is None:
                    raise BlockyardError(Reason.FIELD_INVALID, f"the stream ended within {head.name}")
                if piece[0] != index:
                    raise BlockyardError(Reason.FIELD_INVALID, f"received tensor {piece[0]} instead of {head.name}")
                arrival.add(piece[1])
            self.num_bytes += head.num_bytes
            self.num_tensors += 1
            self._tensors.put((head, arrival.finish()))

    def fail(self, error: BaseException) -> None:
        """Ends the device thread's wait."""
        self._tensors.put(BlockyardError(Reason.WRONG_STATE, f"the update was interrupted: {error}"))

    # The device thread's side.

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Waits for the next tensor, and returns it as it was sent."""
        found = self._tensors.get()
        if isinstance(found, Exception):
            raise found
        self._loop.call_soon_threadsafe(self._room.release)
        head, tensor = found
        if head.name != name:
            raise BlockyardError(Reason.BUG, f"{head.name} came where {name} is read")
        digest = sample_digest(name, head.shape, head.stored_dtype, tensor)
        if head.sample_sha256 not in (b"", digest):
            raise BlockyardError(Reason.FIELD_INVALID, f"{name} does not match its sample_sha256")
        self._digests[name] = digest
        return tensor

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Registers a tensor that another stage reads. It is only sent, and then read, if its sample is not known."""
        if name not in self._digests:
            self.read(name, shape)

    def finish(self) -> str:
        """Returns the digest of the weights, which equals the digest of a folder with the same tensors."""
        return weights_digest(self._digests)
