"""Sends new weights to the workers of a running system, for whoever trains them.

A gateway's admin API is told what will come, and says where to send it: the bytes go to the workers, and to nobody
else. Weights are safetensors: files, or what `safetensors.torch.save` makes. Imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.client.access import ClientAccess
from blockyard.common.v1 import administration_pb2
from blockyard.errors import from_rpc_error
from blockyard.model_files import tensor_digest
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Buffer = bytes | bytearray | memoryview | mmap.mmap

# At most 8 MiB. Larger ones leave the processor's caches, and take fresh pages of memory at every copy.
PIECE_BYTES = 1 << 20
UPDATE_SECONDS = 3600.0
UPDATE_WEIGHTS = "/blockyard.worker.v1.WorkerService/UpdateWeights"
# Field 2 of UpdateWeightsRequest, of which the length follows.
DATA_TAG = b"\x12"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: `dtype` as safetensors names it; `data` its bytes, little-endian, without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def head(self) -> administration_pb2.TensorHead:
        return administration_pb2.TensorHead(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            crc32=zlib.crc32(self.data),
            sample_sha256=tensor_digest(self.name, self.shape, self.dtype, self.data),
        )


def read_tensors(weights: Path | str | Buffer) -> list[Tensor]:
    """Finds the tensors of a folder's safetensors files, of one such file, or of its bytes; copies none.

    Raises ValueError for what is no such file.
    """
    if not isinstance(weights, Path | str):
        return list(_parse(memoryview(weights)))
    path = Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no safetensors files")
    return [tensor for file in files for tensor in _parse(_map(file))]


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _parse(content: memoryview) -> Iterator[Tensor]:
    """The format: https://huggingface.co/docs/safetensors#format."""
    try:
        (header_bytes,) = struct.unpack_from("<Q", content)
        header = cast("dict[str, Any]", json.loads(bytes(content[8 : 8 + header_bytes])))
    except (struct.error, ValueError):
        raise ValueError("this is no safetensors file") from None
    data = content[8 + header_bytes :]
    for name, fields in header.items():
        if name != "__metadata__":
            begin, end = fields["data_offsets"]
            yield Tensor(name, fields["dtype"], tuple(fields["shape"]), data[begin:end])


def update_weights(
    admin_address: str,
    weights: Path | str | Buffer | Iterable[Tensor],
    version: str,
    *,
    replicas: Sequence[str] = (),
    mode: str = "keep",
    together: bool = False,
    shared: bool = False,
    access: ClientAccess | None = None,
    worker_access: ClientAccess | None = None,
) -> dict[int, str]:
    """Has replicas compute with other weights, and returns the determinism id of each by its number.

    Args:
        admin_address: the gateway's admin port, host:port.
        weights: see `read_tensors`; or tensors.
        version: the name that they get: `Finished.weight_versions` of answers has it.
        replicas: which, as `blockyard admin status` names them; empty: all, one after another.
        mode: their requests go on elsewhere or afterwards (keep), are finished first (wait), or fail (abort).
        together: all replicas at once.
        shared: `weights` is a folder that the workers read themselves: on their machines, below --worker-model-root,
            with the model's config.json. In memory (/dev/shm) it is the fastest way between processes of one machine.
        access: credentials for the gateway.
        worker_access: credentials for the workers: with TLS between services a certificate of `trainer.` and the
            services' domain, and `worker.` and that domain as the expected name.

    Raises:
        BlockyardError: what a service says. What broke off leaves a replica stale until it is updated again or woken
            with `reload`.
        ValueError: for what are no safetensors; for what is shared and no folder.
    """
    tensors = [] if shared else _list_tensors(weights)
    request = admin_pb2.UpdateWeightsRequest(
        replicas=replicas,
        version=version,
        mode=admin_pb2.LeaveMode.Value(f"LEAVE_MODE_{mode.upper()}"),
        together=together,
        tensors=_make_heads(tensors),
        model=_require_folder(weights) if shared else "",
    )
    access, worker_access = access or ClientAccess(), worker_access or ClientAccess()
    identities: dict[int, str] = {}
    sendings: list[Future[None]] = []
    try:
        with access.make_channel(admin_address) as channel, ThreadPoolExecutor() as senders:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            call = stub.UpdateWeights(request, metadata=access.metadata, timeout=UPDATE_SECONDS)
            for event in call:
                if event.HasField("updated"):
                    identities[event.replica_id] = event.updated.determinism_id
                    continue
                for sending in _begin_sending(senders, worker_access, event.expected, tensors):
                    sending.add_done_callback(lambda done: call.cancel() if done.exception() else None)
                    sendings.append(sending)
    except grpc.RpcError as error:
        # A worker's error says more than the one that its scheduler makes of it.
        failures = [failure for sending in sendings if isinstance(failure := sending.exception(), grpc.RpcError)]
        raise from_rpc_error(failures[0] if failures else error) from None
    return identities


def _list_tensors(weights: Path | str | Buffer | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(weights, Path | str | bytes | bytearray | memoryview | mmap.mmap):
        return read_tensors(cast("Path | str | Buffer", weights))
    return list(weights)


def _make_heads(tensors: Sequence[Tensor]) -> list[administration_pb2.TensorHead]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(Tensor.head, tensors))


def _require_folder(weights: object) -> str:
    if isinstance(weights, Path | str):
        return str(weights)
    raise ValueError("weights can be shared only from a folder")


def _begin_sending(
    senders: ThreadPoolExecutor,
    access: ClientAccess,
    expected: admin_pb2.ExpectedTensors,
    tensors: Sequence[Tensor],
) -> list[Future[None]]:
    orders = zip(expected.worker_addresses, expected.orders, strict=True)
    return [
        senders.submit(_send, access, address, _make_pieces(expected.ticket, order.indices, tensors))
        for address, order in orders
    ]


def _send(access: ClientAccess, address: str, pieces: Iterator[bytes]) -> None:
    with access.make_channel(address) as channel:
        read = worker_pb2.UpdateWeightsResponse.FromString
        # The pieces are bytes already.
        send = channel.stream_unary(UPDATE_WEIGHTS, request_serializer=bytes, response_deserializer=read)
        send(pieces, timeout=UPDATE_SECONDS)


def _make_pieces(ticket: bytes, order: Iterable[int], tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Makes encoded messages, each by a single copy of what it sends: protobuf's own encoding makes three."""
    for index in order:
        data = tensors[index].data
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            head = worker_pb2.UpdateWeightsRequest(tensor=index, ticket=ticket).SerializeToString()
            yield b"".join((head, DATA_TAG, _varint(len(piece)), piece))
            ticket = b""


def _varint(number: int) -> bytes:
    """The format: https://protobuf.dev/programming-guides/encoding/#varints."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
