"""A fake worker that answers what cannot be, in one of many ways, so often as it is asked to.

`KINDS` holds them by name: the rpc whose answer is changed, and the change, which gives a message or the bytes of none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc.aio
from google.protobuf.message import Message

from blockyard.common.v1 import sampling_pb2, status_pb2
from blockyard.google_rpc import status_pb2 as rpc_status_pb2
from blockyard.worker.v1 import worker_pb2
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
Change = Callable[[Any], Any]
MOST_32, MOST_64 = 2**32 - 1, 2**64 - 1


class Kind(NamedTuple):
    """One way to answer wrong."""

    rpc: str
    change: Change


class WrongWorker(FakeWorker):
    """A fake worker whose answers are changed `times` times; `applied` is set and counts how often that was."""

    def __init__(self, kind: Kind, times: float, options: FakeWorkerOptions, address: str) -> None:
        self.kind = kind
        self.times = times
        self.num_applied = 0
        super().__init__(options, address)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answers the service with messages, or with any bytes."""
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))

    def _handler(self, method: Any) -> Any:
        answer: Any = getattr(self, method.name)
        # Looked up by its name, so that one pool makes all the messages.
        read = getattr(worker_pb2, method.input_type.name).FromString
        if method.server_streaming:

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                async for message in answer(request, context):
                    yield await self._change(method.name, message)

            if method.client_streaming:
                return grpc.stream_stream_rpc_method_handler(stream, read, _serialize)
            return grpc.unary_stream_rpc_method_handler(stream, read, _serialize)

        async def unary(request: Any, context: Any) -> Any:
            return await self._change(method.name, await answer(request, context))

        return grpc.unary_unary_rpc_method_handler(unary, read, _serialize)

    async def _change(self, rpc: str, message: Any) -> Any:
        if rpc != self.kind.rpc or self.times < 1:
            return message
        if rpc == "ExecuteModel" and not message.sequence_ids:
            # Of a step that sampled nobody: there is little to say wrong.
            return message
        changed = self.kind.change(message)
        if isinstance(changed, Message) and changed is message:
            raise AssertionError("a change makes another message")
        self.times -= 1
        self.num_applied += 1
        await asyncio.sleep(0)
        return changed


def _serialize(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _merge(**fields: Any) -> Change:
    """Sets fields, whole lists too."""

    def change(message: Any) -> Any:
        changed = type(message)()
        changed.CopyFrom(message)
        for name in fields:
            changed.ClearField(name)
        changed.MergeFrom(type(message)(**fields))
        # What a constructor leaves out because it is the default was cleared above.
        return changed

    return change


def _edit(edit: Callable[[Any], object]) -> Change:
    """Has a copy changed in place."""

    def change(message: Any) -> Any:
        changed = type(message)()
        changed.CopyFrom(message)
        edit(changed)
        return changed

    return change


def _set(**values: Any) -> Callable[[Any], None]:
    def edit(message: Any) -> None:
        for name, value in values.items():
            setattr(message, name, value)

    return edit


def _inside(name: str, **values: Any) -> Change:
    """Changes a message that another one holds, once it is there."""
    return _edit(lambda message: _set(**values)(getattr(message, name)))


def _bytes(data: bytes) -> Change:
    return lambda _: data


def _logprobs(
    num_candidates: list[int], token_ids: list[int], logprobs: list[float], ranks: list[int]
) -> sampling_pb2.Logprobs:
    return sampling_pb2.Logprobs(num_candidates=num_candidates, token_ids=token_ids, logprobs=logprobs, ranks=ranks)


def _told(columns: sampling_pb2.Logprobs, num_entries: int = 1) -> Change:
    """Log probabilities of the first sampled sequences, or of some that are not there."""

    def edit(message: Any) -> None:
        known = [*message.sequence_ids, 901, 902]
        message.logprob_sequence_ids.extend(known[:num_entries])
        message.logprobs.CopyFrom(columns)

    return _edit(edit)


def _prompt(first_position: int, columns: sampling_pb2.Logprobs, num_pieces: int = 1) -> Change:
    def edit(message: Any) -> None:
        for _ in range(num_pieces):
            message.prompt_logprobs.add(sequence_id=1, first_position=first_position, logprobs=columns)

    return _edit(edit)


def _double(*names: str) -> Change:
    """Says what it says twice."""

    def edit(message: Any) -> None:
        for name in names:
            getattr(message, name).extend([*getattr(message, name), 1])

    return _edit(edit)


def _drop(name: str) -> Change:
    def edit(message: Any) -> None:
        column = getattr(message, name)
        column.extend([1])
        del column[:1]
        column.extend([1, 1])

    return _edit(edit)


def _time(part: str, seconds: int, nanos: int = 0) -> Change:
    return _edit(lambda message: _set(seconds=seconds, nanos=nanos)(getattr(message.times, part)))


def _refuse(code: int, text: str) -> Change:
    def edit(message: Any) -> None:
        message.refusal.code = code
        message.refusal.message = text
        # A detail that says that it is one of ours, and is no message.
        message.refusal.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")

    return _edit(edit)


_ONE = _logprobs([1], [1], [-1.0], [1])
_STEP, _INFO, _CACHE, _LOAD, _BLOCKS = (
    "ExecuteModel",
    "GetWorkerInfo",
    "InitializeCache",
    "LoadModel",
    "DetermineNumAvailableBlocks",
)
KINDS: dict[str, Kind] = {
    # A step's answer: bytes and identities.
    "step: no message": Kind(_STEP, _bytes(b"\xff\xff\xff\xff")),
    "step: cut off": Kind(_STEP, lambda message: message.SerializeToString()[:-1]),
    "step: a text that is no UTF-8": Kind(_STEP, _bytes(b"\x3a\x04\x12\x02\xff\xfe")),
    "step: nothing": Kind(_STEP, _bytes(b"")),
    "step: another epoch": Kind(_STEP, _edit(_set(epoch=9))),
    "step: the last epoch": Kind(_STEP, _edit(_set(epoch=MOST_64))),
    "step: another step": Kind(_STEP, _edit(lambda m: setattr(m, "step_id", m.step_id + 1))),
    "step: the last step": Kind(_STEP, _edit(_set(step_id=MOST_64))),
    # Tokens.
    "tokens: the vocabulary's size": Kind(_STEP, _edit(lambda m: m.token_ids.__setitem__(-1, 100))),
    "tokens: the largest number": Kind(_STEP, _edit(lambda m: m.token_ids.__setitem__(0, MOST_32))),
    "tokens: one too few": Kind(_STEP, _edit(lambda m: m.token_ids.pop())),
    "tokens: one too many": Kind(_STEP, _drop("token_ids")),
    "tokens: none": Kind(_STEP, _edit(lambda m: m.ClearField("token_ids"))),
    "sequences: one too many": Kind(_STEP, _drop("sequence_ids")),
    "sequences: twice": Kind(_STEP, _double("sequence_ids", "token_ids")),
    "sequences: others": Kind(_STEP, _edit(lambda m: m.sequence_ids.__setitem__(0, 777))),
    "sequences: nobody": Kind(_STEP, _merge(sequence_ids=[], token_ids=[])),
    "sequences: backwards": Kind(
        _STEP, _edit(lambda m: (m.sequence_ids.append(m.sequence_ids[0] + 50), m.token_ids.append(1)))
    ),
    "sequences: a million": Kind(_STEP, _merge(sequence_ids=range(10**6), token_ids=[1] * 10**6)),
    "runs: one too long": Kind(
        _STEP, _edit(lambda m: (m.token_ids.append(1), m.num_tokens.extend([*[1] * (len(m.sequence_ids) - 1), 2])))
    ),
    "runs: nothing": Kind(_STEP, _edit(lambda m: (m.token_ids.pop(), m.num_tokens.extend([0] * len(m.sequence_ids))))),
    "runs: drafts of nobody": Kind(_STEP, _edit(_set(num_draft_tokens=3, num_accepted_tokens=MOST_32))),
    "skipped: one that goes on": Kind(
        _STEP, _edit(lambda m: (m.skipped_sequence_ids.append(m.sequence_ids.pop()), m.token_ids.pop()))
    ),
    "skipped: a million": Kind(_STEP, _merge(skipped_sequence_ids=range(10**6))),
    "failures: ten thousand": Kind(
        _STEP, _edit(lambda m: m.failures.extend(worker_pb2.SequenceFailure(sequence_id=i) for i in range(10**4)))
    ),
    # Log probabilities.
    "logprobs: no columns": Kind(_STEP, _edit(lambda m: m.logprob_sequence_ids.append(1))),
    "logprobs: no sequences": Kind(_STEP, _told(_ONE, 0)),
    "logprobs: more sequences than entries": Kind(_STEP, _told(_ONE, 2)),
    "logprobs: more entries than sequences": Kind(_STEP, _told(_logprobs([1, 1], [1, 1], [-1, -1], [1, 1]))),
    "logprobs: fewer ids than counted": Kind(_STEP, _told(_logprobs([2], [1], [-1.0], [1]))),
    "logprobs: more ids than counted": Kind(_STEP, _told(_logprobs([1], [1, 2], [-1, -1], [1, 1]))),
    "logprobs: fewer numbers than ids": Kind(_STEP, _told(_logprobs([2], [1, 2], [-1.0], [1, 1]))),
    "logprobs: fewer ranks than ids": Kind(_STEP, _told(_logprobs([2], [1, 2], [-1.0, -1.0], [1]))),
    "logprobs: an entry of nothing": Kind(_STEP, _told(_logprobs([0], [], [], []))),
    "logprobs: four billion candidates": Kind(_STEP, _told(_logprobs([MOST_32], [1], [-1.0], [1]))),
    "logprobs: not a number": Kind(_STEP, _told(_logprobs([1], [1], [math.nan], [1]))),
    "logprobs: infinite": Kind(_STEP, _told(_logprobs([1], [1], [math.inf], [1]))),
    "logprobs: huge": Kind(_STEP, _told(_logprobs([1], [1], [3e38], [1]))),
    "logprobs: an id beyond the vocabulary": Kind(_STEP, _told(_logprobs([1], [MOST_32], [-1.0], [1]))),
    # Beams.
    "beams: nobody has any": Kind(
        _STEP, _edit(lambda m: (m.beam_sequence_ids.append(7), m.beam_candidates.CopyFrom(_ONE)))
    ),
    "beams: no columns": Kind(_STEP, _edit(lambda m: m.beam_sequence_ids.extend(m.sequence_ids))),
    "beams: no sequences": Kind(_STEP, _edit(lambda m: m.beam_candidates.CopyFrom(_ONE))),
    "beams: not a number": Kind(
        _STEP,
        _edit(
            lambda m: (
                m.beam_sequence_ids.append(7),
                m.beam_candidates.CopyFrom(_logprobs([1], [1], [math.nan], [])),
            )
        ),
    ),
    # Prompts.
    "prompt: from 0 on": Kind(_STEP, _prompt(0, _ONE)),
    "prompt: far beyond": Kind(_STEP, _prompt(MOST_32, _ONE)),
    "prompt: columns of two lengths": Kind(_STEP, _prompt(1, _logprobs([1], [1, 2], [-1.0], []))),
    "prompt: ten thousand pieces": Kind(_STEP, _prompt(1, _ONE, 10**4)),
    # Times.
    "times: before it began": Kind(_STEP, _time("forward", -5)),
    "times: three hundred billion seconds": Kind(_STEP, _time("sample", 2**62)),
    "times: nanoseconds below zero": Kind(_STEP, _time("cache_operations", 0, -(2**31))),
    # Refusals that are none.
    "refusal: somebody is gone": Kind(_STEP, _refuse(14, "gone")),
    "refusal: no such code": Kind(_STEP, _refuse(-7, "x" * 100_000)),
    "refusal: of nothing": Kind(_STEP, _merge(refusal=rpc_status_pb2.Status())),
    "draining: it is not": Kind(_STEP, _edit(_set(draining=True))),
    # Who it is.
    "info: no message": Kind(_INFO, _bytes(b"\xff\xff\xff")),
    "info: nothing": Kind(_INFO, _bytes(b"")),
    "info: a state without a name": Kind(_INFO, _edit(_set(state=99))),
    "info: no state": Kind(_INFO, _edit(_set(state=status_pb2.WORKER_STATE_UNSPECIFIED))),
    "info: the last epoch": Kind(_INFO, _edit(_set(epoch=MOST_64))),
    "info: the last epoch but one": Kind(_INFO, _edit(_set(epoch=MOST_64 - 1))),
    "info: a group of the last epoch": Kind(_INFO, _edit(lambda m: setattr(m.group, "epoch", MOST_64))),
    "info: a name of a megabyte": Kind(_INFO, _edit(_set(worker_id="x" * 2**20))),
    "info: pools of nothing": Kind(_INFO, _edit(lambda m: m.cache.CopyFrom(worker_pb2.CacheInfo()))),
    "info: a model of nothing": Kind(_INFO, _edit(lambda m: m.model.CopyFrom(worker_pb2.LoadedModel()))),
    # What it loaded, and its pools.
    "load: no message": Kind(_LOAD, _bytes(b"\xff\xff\xff")),
    "load: no vocabulary": Kind(_LOAD, _inside("loaded", vocab_size=0)),
    "load: another model": Kind(_LOAD, _inside("loaded", vocab_size=7, max_model_len=9, model_digest="1")),
    "blocks: no message": Kind(_BLOCKS, _bytes(b"\xff\xff\xff")),
    "blocks: four billion": Kind(_BLOCKS, _edit(_set(num_device_blocks=MOST_32, num_host_blocks=MOST_32))),
    "blocks: of no tokens": Kind(_BLOCKS, _edit(_set(block_size=0))),
    "blocks: of more bytes than there are": Kind(_BLOCKS, _edit(_set(cache_block_bytes=MOST_64))),
    "cache: no message": Kind(_CACHE, _bytes(b"\xff\xff\xff")),
    "cache: nothing": Kind(_CACHE, _bytes(b"")),
    "cache: four billion blocks": Kind(_CACHE, _inside("cache", num_device_blocks=MOST_32)),
    "cache: other blocks": Kind(_CACHE, _inside("cache", block_size=32)),
    "cache: times of nothing": Kind(_CACHE, _edit(lambda m: m.cache.decode_seconds.append(1.0))),
    "cache: no time": Kind(
        _CACHE, _edit(lambda m: (m.cache.decode_rows.append(1), m.cache.decode_seconds.append(math.nan)))
    ),
    "cache: one token": Kind(_CACHE, _inside("cache", max_model_len=1)),
}
