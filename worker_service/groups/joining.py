"""Joining a group: a rank meets the others, connects to them, and verifies who they are.

Runs in the device thread, except for checks before it. Knows only the epoch of its request.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.addresses import LOCALHOST, host_of
from blockyard.errors import BlockyardError, Reason
from blockyard.security.exposure import is_loopback
from blockyard.service import faults
from worker_service.collectives import nccl
from worker_service.collectives.process_group import join_gloo

if TYPE_CHECKING:
    from blockyard.contract.parallel import Parallel
    from blockyard.contract.workers import GroupRequest
    from worker_service.collectives.group import GroupLifetime, RankGroup
    from worker_service.groups.rendezvous import RendezvousStore

PROOF_BYTES = 32
FINGERPRINT_BYTES = 32
# Ranks that have met connect within milliseconds. Only this timeout frees a rank that waits for a connection.
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The start options of a worker for groups: transport and host, and whether plaintext is allowed.

    `collectives`: "auto", "gloo" or "nccl". `host`: where other ranks reach this one; empty: the address from which
    this worker reaches rank 0.
    """

    collectives: str = "auto"
    host: str = ""
    allow_insecure: bool = False


DEFAULT_SETTINGS = GroupSettings()


@dataclass(frozen=True, slots=True)
class Route:
    """The transport, "gloo" or "nccl", and the host by which other ranks reach this one."""

    kind: str
    host: str


def find_route(settings: GroupSettings, device: torch.device, rendezvous_address: str) -> Route:
    """Chooses how other ranks reach this one; raises BlockyardError FEATURE_DISABLED if no way is allowed or works."""
    kind = settings.collectives
    if kind == "auto":
        kind = "nccl" if device.type == "cuda" else "gloo"
    if (kind == "nccl") != (device.type == "cuda"):
        raise BlockyardError(Reason.FEATURE_DISABLED, f"--collectives {kind} does not work on a {device.type}")
    host = settings.host or _find_host(rendezvous_address)
    if not settings.allow_insecure and not is_loopback(host):
        message = (
            f"the ranks would talk to {host} without encryption: keep others out of their network and start "
            "the workers with --allow-insecure-group, or keep a group on one machine (docs/guides/security.md)"
        )
        raise BlockyardError(Reason.FEATURE_DISABLED, message)
    return Route(kind, host)


def _find_host(rendezvous_address: str) -> str:
    """Returns this machine's own address on the route to rank 0."""
    if rendezvous_address.startswith("unix:"):
        return LOCALHOST
    host, port = host_of(rendezvous_address).strip("[]"), rendezvous_address.rpartition(":")[2]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # This sends nothing: it only asks the system for the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"rank 0 cannot be reached at {rendezvous_address}: {error}"
        raise BlockyardError(Reason.GROUP_BROKEN, message) from None


def join(
    store: RendezvousStore, parallel: Parallel, route: Route, device: torch.device, lifetime: GroupLifetime
) -> RankGroup:
    """Meets the other ranks and connects to them; raises BlockyardError, RuntimeError or TimeoutError."""
    faults.reach(faults.BEFORE_JOIN)
    _compare_set_ups(store, parallel, route.kind)
    if route.kind == "gloo":
        return join_gloo(store, parallel, lifetime, route.host, min(CONNECT_SECONDS, max(1.0, store.seconds_left)))
    nccl.set_environment(route.host)
    return nccl.join_nccl(store, parallel, lifetime, device)


def _compare_set_ups(store: RendezvousStore, parallel: Parallel, kind: str) -> None:
    """Compares the settings of all ranks, since ranks with different settings would wait for each other in vain."""
    mine = f"{kind}, {parallel.tensor_parallel_size} × {parallel.pipeline_parallel_size}"
    store.set(f"set-up {parallel.rank}", mine)
    for rank in range(parallel.world_size):
        try:
            its = store.get(f"set-up {rank}").decode(errors="replace")
        except TimeoutError:
            message = f"rank {rank} did not join the group in time"
            raise BlockyardError(Reason.GROUP_BROKEN, message, metadata={"peer": str(rank)}) from None
        if its != mine:
            message = f"rank {rank} is set up for {its}, rank {parallel.rank} for {mine}"
            raise BlockyardError(Reason.WRONG_STATE, message)


def greet(
    group: RankGroup, parallel: Parallel, device: torch.device, request: GroupRequest, fingerprint: bytes
) -> bytes:
    """Runs the first operation of each kind; raises BlockyardError GROUP_BROKEN for a peer that is not in the group.

    The connections between ranks have no passwords, so each rank proves over them that it knows the secret.

    Args:
        group: the group; all ranks call this at the same time.
        parallel: this rank's place.
        device: the device of the group's tensors.
        request: the scheduler's request to join the group.
        fingerprint: the network's fingerprint [FINGERPRINT_BYTES], if this rank knows it, else empty.

    Returns:
        The fingerprint that any rank knows; empty if no rank knows it.
    """
    group.stage.add(torch.zeros(1, 1, device=device))
    _greet_stages(group, parallel, torch.zeros(1, 1, device=device))
    proofs = torch.stack([_proof(request, rank) for rank in range(parallel.world_size)])
    seen = torch.zeros_like(proofs)
    seen[parallel.rank] = proofs[parallel.rank]
    seen = seen.to(device)
    # This needs a message from every rank: afterwards no rank needs the meeting point any more.
    group.world.add_bits(seen)
    seen = seen.cpu()
    if group.world.is_broken:
        raise BlockyardError(Reason.GROUP_BROKEN, "the group was ended while it was formed")
    for rank, (proof, known) in enumerate(zip(seen, proofs, strict=True)):
        if not torch.equal(proof, known):
            raise BlockyardError(
                Reason.GROUP_BROKEN, f"the worker that answers as rank {rank} does not know this group"
            )
    return _exchange(group, parallel, device, fingerprint)


def _exchange(group: RankGroup, parallel: Parallel, device: torch.device, fingerprint: bytes) -> bytes:
    known = torch.zeros(parallel.world_size, FINGERPRINT_BYTES // 4, dtype=torch.int32)
    if fingerprint:
        known[parallel.rank] = torch.from_numpy(np.frombuffer(fingerprint, np.int32).copy())
    known = known.to(device)
    group.world.add_bits(known)
    return next((row.numpy().tobytes() for row in known.cpu() if row.any()), b"")


def _greet_stages(group: RankGroup, parallel: Parallel, rows: torch.Tensor) -> None:
    """Uses the connections of the pipeline once, in its direction."""
    if parallel.pipeline_rank > 0:
        group.receive(rows)
    if not parallel.is_last_stage:
        group.send(rows)


def _proof(request: GroupRequest, rank: int) -> torch.Tensor:
    said = "\n".join([str(request.epoch), str(rank), *request.members])
    digest = hashlib.blake2b(said.encode(), key=request.secret, digest_size=PROOF_BYTES).digest()
    return torch.from_numpy(np.frombuffer(digest, np.int32).copy())
