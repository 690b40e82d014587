"""Calls a gateway's admin API for this machine's systems: drains, profiles, prefix caches, memory, worker operations.

Answers are plain lists, ordered by replica and then by rank.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.contract.codec.messages import encode_seconds
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.headers import MODEL_KEY

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

# The deadline of calls that only read or change a little state.
CALL_SECONDS = 30.0
PROFILE_SECONDS = 150.0
# The call may wait for requests to finish, or load weights.
MEMORY_SECONDS = 3600.0
# The call's deadline exceeds the workers' own timeout by this much.
GRACE_SECONDS = 10.0
_TAGS = {"weights": administration_pb2.MEMORY_TAG_WEIGHTS, "kv_cache": administration_pb2.MEMORY_TAG_KV_CACHE}
WRITE_AN_EXTENSION = (
    "a function cannot be sent to a worker: that would be a way to run any code there. Put it into a class, start with "
    'worker_extension="package.module:Class", and call it by its name, "extension.operation" '
    "(docs/guides/inspect.md shows how)"
)


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


class Operator:
    """Operator's calls to the system behind a channel. Every call raises BlockyardError."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def _replicas(self) -> list[Any]:
        with _translated():
            status = await self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        if not status.HasField("scheduler"):
            raise BlockyardError(Reason.NO_READY_WORKER, status.gateway.message)
        return list(status.scheduler.replicas)

    async def drain(self, model: str) -> bool:
        """Makes a model's replicas take no new requests, which wait. Returns whether they have none left."""
        metadata = ((MODEL_KEY, model),)
        with _translated():
            status = await self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_SECONDS, metadata=metadata)
            states = {replica.replica_id: replica.drain_state for replica in status.scheduler.replicas}
            for replica_id, state in states.items():
                if state == status_pb2.DRAIN_STATE_UNSPECIFIED:
                    request = admin_pb2.DrainReplicaRequest(replica=str(replica_id))
                    await self._stub.DrainReplica(request, timeout=CALL_SECONDS, metadata=metadata)
        return set(states.values()) == {status_pb2.DRAIN_STATE_DRAINED}

    async def call(self, extension: str, operation: str, payload: bytes, seconds: float | None) -> list[bytes]:
        """Runs an extension's operation on every worker and returns their answers."""

        def ask(replica: str) -> Any:
            request = admin_pb2.CallExtensionRequest(
                replica=replica,
                extension=extension,
                operation=operation,
                payload=payload,
                timeout=encode_seconds(seconds),
            )
            return self._stub.CallExtension(request, timeout=_patience(seconds))

        with _translated():
            replicas = sorted(replica.replica_id for replica in await self._replicas())
            answers = await asyncio.gather(*(ask(str(replica_id)) for replica_id in replicas))
        return [each.result for answer in answers for each in answer.results]

    async def sleep(self, level: int) -> None:
        """Makes every replica free its memory; running requests go on after `wake_up`."""
        with _translated():
            for replica in await self._replicas():
                request = admin_pb2.SleepReplicaRequest(replica=str(replica.replica_id), level=level)
                await self._stub.SleepReplica(request, timeout=MEMORY_SECONDS)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Makes every replica allocate its memory again and reload dropped weights.

        Raises TypeError for an unknown tag.
        """
        if unknown := sorted(set(tags).difference(_TAGS)):
            raise TypeError(f"unknown tags: {', '.join(unknown)}; there are {', '.join(_TAGS)}")
        wanted, reload = [_TAGS[tag] for tag in tags], not tags or "weights" in tags
        with _translated():
            for replica in await self._replicas():
                request = admin_pb2.WakeReplicaRequest(replica=str(replica.replica_id), tags=wanted, reload=reload)
                await self._stub.WakeReplica(request, timeout=MEMORY_SECONDS)

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix caches; returns False if blocks in use were kept."""
        with _translated():
            answer = await self._stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=CALL_SECONDS)
        return not any(each.num_kept_device_blocks + each.num_kept_host_blocks for each in answer.replicas)

    async def _workers(self) -> list[str]:
        replicas = sorted(await self._replicas(), key=lambda replica: replica.replica_id)
        return [worker.address for replica in replicas for worker in replica.workers]

    async def start_profile(self) -> None:
        """Starts a profile of every worker."""
        with _translated():
            for worker in await self._workers():
                request = admin_pb2.StartProfileRequest(replica=worker)
                await self._stub.StartProfile(request, timeout=PROFILE_SECONDS)

    async def stop_profile(self, folder: Path) -> list[Path]:
        """Ends the profiles and writes one file per worker into a folder; returns the paths."""
        files: list[Path] = []
        with _translated():
            for number, worker in enumerate(await self._workers()):
                request = admin_pb2.StopProfileRequest(replica=worker)
                pieces = [piece.data async for piece in self._stub.StopProfile(request, timeout=PROFILE_SECONDS)]
                files.append(folder / f"blockyard-profile-worker-{number}.json.gz")
                files[-1].write_bytes(b"".join(pieces))
        return files


def _patience(seconds: float | None) -> float:
    return (CALL_SECONDS if seconds is None else seconds) + GRACE_SECONDS
