"""Encodes the answer to `DumpState`: every request, where it is and what it holds. Neither text nor token ids."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.contract.codec.messages import encode_seconds
from scheduler_service.admin.status_codec import encode_status

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.requests.registry import Request
    from scheduler_service.service import SchedulerService


def encode_state(service: SchedulerService, max_requests: int) -> admin_pb2.SchedulerState:
    """Encodes the scheduler's state, with at most `max_requests` requests, the oldest first."""
    live, now = service.requests.live, service.now
    return admin_pb2.SchedulerState(
        status=encode_status(service),
        replicas=[_encode_replica(engine) for engine in service.engines if engine.scheduler is not None],
        requests=[_encode_request(request, now) for request in islice(live.values(), max_requests)],
        num_requests=len(live),
        gateway_ids=[outbox.gateway_id for outbox in service.requests.outboxes],
        suspect_request_ids=service.dispatcher.suspect_request_ids,
    )


def _encode_replica(engine: Engine) -> admin_pb2.ReplicaState:
    return admin_pb2.ReplicaState(
        replica_id=engine.replica_id,
        steps=[
            admin_pb2.StepState(step_id=step_id, num_sequences=num_sequences, num_tokens=num_tokens)
            for step_id, num_sequences, num_tokens in engine.step_loop.in_flight.describe()
        ],
    )


def _encode_request(request: Request, now: float) -> admin_pb2.RequestState:
    group = request.group
    spec = group.spec
    return admin_pb2.RequestState(
        request_id=request.request_id,
        tenant=spec.tenant,
        priority=spec.priority,
        age=encode_seconds(max(0.0, now - group.arrived_at)),
        replica_id=request.engine.replica_id if request.engine else None,
        num_prompt_tokens=group.prompt_length,
        num_cached_tokens=group.num_cached_tokens,
        max_length=group.max_length,
        readers=[outbox.owner for outbox in request.handles],
        is_recovering=request.lost is not None,
        is_beam_search=group.beams is not None,
        sequences=map(_encode_sequence, group.computed),
    )


def _encode_sequence(sequence: Sequence) -> admin_pb2.SequenceState:
    return admin_pb2.SequenceState(
        sequence_id=sequence.sequence_id,
        sequence_index=sequence.sequence_index,
        status=sequence.status.name,
        num_tokens=len(sequence.token_ids),
        num_computed_tokens=sequence.num_computed,
        num_scheduled_tokens=sequence.num_scheduled,
        num_device_blocks=sum(block > 0 for block in sequence.block_ids) + len(sequence.fixed_ids),
        num_host_blocks=len(sequence.host_blocks) + len(sequence.fixed_host),
    )
