"""Sends new weights from a trainer to the workers of a running system.

The gateway's admin API is sent the tensors' names and shapes, and returns the workers' addresses; the bytes go straight
to the workers. Weights are safetensors: files, or the bytes of `safetensors.torch.save`. Imports neither torch nor
numpy.
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

# At most 8 MiB: larger pieces fall out of the processor's caches and need fresh memory pages at every copy.
PIECE_BYTES = 1 << 20
UPDATE_SECONDS = 3600.0
UPDATE_WEIGHTS = "/blockyard.worker.v1.WorkerService/UpdateWeights"
# The protobuf tag of field 2 (bytes) of UpdateWeightsRequest; the length follows it.
DATA_TAG = b"\x12"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. `dtype`: safetensors' name; `data`: the bytes, little-endian and contiguous."""

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
    """Lists the tensors of a folder's safetensors files, of one file, or of a file's bytes, without copying.

    Raises ValueError if it is not a safetensors file, or the folder has none.
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
    """Yields the tensors of a file's bytes. See https://huggingface.co/docs/safetensors#format."""
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
    """Updates the weights of replicas; returns each replica's new determinism id by its number.

    Args:
        admin_address: the gateway's admin port, host:port.
        weights: as for `read_tensors`, or tensors.
        version: the name of the new weights, as reported in `Finished.weight_versions`.
        replicas: the replicas, as `blockyard admin status` names them; empty: all.
        mode: running requests go on elsewhere or afterwards (keep), are finished first (wait), or fail (abort).
        together: update all replicas at once instead of one after another.
        shared: `weights` is a folder that the workers read themselves: on their machines, below --worker-model-root,
            with the model's config.json. On one machine a folder in memory (/dev/shm) is the fastest way.
        access: credentials for the gateway.
        worker_access: credentials for the workers. With TLS between services: a certificate for `trainer.` plus the
            services' domain, and `worker.` plus that domain as the expected server name.

    Raises:
        BlockyardError: a service's error. An update that broke off leaves a replica stale until it is updated again, or
            woken with `reload`.
        ValueError: `weights` is not a safetensors file, or `shared` is set and it is not a folder.
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
        # A worker's own error says more than the error that the scheduler derives from it.
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
        # The pieces are encoded messages already.
        send = channel.stream_unary(UPDATE_WEIGHTS, request_serializer=bytes, response_deserializer=read)
        send(pieces, timeout=UPDATE_SECONDS)


def _make_pieces(ticket: bytes, order: Iterable[int], tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Yields encoded messages. Each copies its data once; protobuf's own encoding would copy three times."""
    for index in order:
        data = tensors[index].data
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            head = worker_pb2.UpdateWeightsRequest(tensor=index, ticket=ticket).SerializeToString()
            yield b"".join((head, DATA_TAG, _varint(len(piece)), piece))
            ticket = b""


def _varint(number: int) -> bytes:
    """Encodes a varint: https://protobuf.dev/programming-guides/encoding/#varints."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
