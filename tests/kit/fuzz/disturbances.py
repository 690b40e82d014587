"""Half-valid requests into the real services, as processes, beside an innocent stream. The verdict: epochs lost, 0.

One half comes as clients send it, through the gateway: new requests and resumes with the tokens received so far. The
other half comes as another gateway would send it, straight to the scheduler: new requests, resubmissions, resumes and
aborts. Each is a right one with something changed in it, so most get as far as a worker or close to it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf import text_format

from blockyard import AsyncClient
from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.errors import BlockyardError, Reason, from_rpc_error, from_status
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.servers import channel_options
from tests.kit.fakes.drafts import Draft
from tests.kit.fuzz.mutations import mutate
from tests.kit.processes.system import ROOT, System

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from random import Random

    from google.protobuf.message import Message

    from tests.kit.fuzz.report import Report

DEMO, VOCAB_SIZE = ROOT / "models" / "demo", 4096
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "50", "--max-loras", "2"]
NUM_AT_A_TIME = 24
CASE_SECONDS = 20.0
# Of each request: so that a run tries many.
MAX_TOKENS, MAX_N = 6, 4
FOREIGN_IDS = (VOCAB_SIZE, VOCAB_SIZE + 1, 2**30, 2**31, 2**32 - 1)
INNOCENT: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
# Nobody's request may end so, whatever it asks for.
NEVER = (Reason.BUG, Reason.POISON_REQUEST)
NO_END = "no end"


class Innocent:
    """A stream that runs again and again beside the others, and is held against its undisturbed run."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._alone: list[int] = []
        self.num_answers = 0
        self.worst_gap_seconds = 0.0
        self.wrong: list[str] = []

    async def run(self) -> None:
        """Answers it alone, if it never was, and else again."""
        token_ids: list[int] = []
        last = time.monotonic()
        try:
            async for event in self._client.stream("Once upon a time", **INNOCENT):
                now = time.monotonic()
                self.worst_gap_seconds = max(self.worst_gap_seconds, now - last)
                last = now
                token_ids.extend(getattr(event, "token_ids", ()))
        except BlockyardError as error:
            self.wrong.append(str(error))
        if not self._alone:
            self._alone, self.worst_gap_seconds = token_ids, 0.0
        elif token_ids != self._alone:
            self.wrong.append(f"{len(token_ids)} tokens, which are others than {len(self._alone)} undisturbed ones")
        self.num_answers += 1

    async def repeat(self) -> None:
        """Answers it until it is cancelled."""
        while True:
            await self.run()


class ForeignGateway:
    """A gateway that says anything: it attaches, sends what it is given, and hears how each request ended."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, channel_options(INTERNAL_MESSAGE_BYTES))
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._writing = asyncio.Lock()
        self._calls: dict[int, _ForeignCall] = {}
        self._of_sequence: dict[int, list[_ForeignCall]] = {}

    async def __aenter__(self) -> ForeignGateway:
        self._call: Any = self._stub.Attach()
        hello = scheduler_pb2.Hello(gateway_id="foreign")
        await self._call.write(scheduler_pb2.AttachRequest(hello=hello))
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reader.cancel()
        self._call.cancel()
        await asyncio.wait({self.reader})
        await self._channel.close()

    async def find_epoch(self) -> int:
        """Asks which epoch the only replica is in."""
        status = (await self._stub.GetSchedulerStatus(scheduler_pb2.GetSchedulerStatusRequest())).status
        return status.replicas[0].epoch

    async def add(self, add: scheduler_pb2.AddRequest) -> str:
        """Sends a request, and waits for its end."""
        submission = scheduler_pb2.Submission.FromString(add.submission)
        known = [sequence.finish_reason for sequence in add.resubmission.sequences] or [0] * min(submission.n, 1000)
        live = [index for index, reason in enumerate(known) if not reason]
        call = _ForeignCall(submission.request_id, live)
        return await self._ask(scheduler_pb2.AttachRequest(add=[add]), add.handle, call)

    async def resume(self, resume: scheduler_pb2.ResumeRequest) -> str:
        """Asks for a request, and waits for its end."""
        call = _ForeignCall(resume.request_id, [])
        return await self._ask(scheduler_pb2.AttachRequest(resume=[resume]), resume.handle, call)

    async def abort(self, abort: scheduler_pb2.AbortRequest) -> str:
        """Ends a request, of which nothing more is told."""
        await self._write(scheduler_pb2.AttachRequest(abort=[abort]))
        for call in self._calls.values():
            if call.request_id == abort.request_id:
                call.finish("aborted")
        return "sent"

    async def _ask(self, message: scheduler_pb2.AttachRequest, handle: int, call: _ForeignCall) -> str:
        self._calls[handle] = call
        try:
            await self._write(message)
            return await call.end
        finally:
            del self._calls[handle]

    async def _write(self, message: scheduler_pb2.AttachRequest) -> None:
        async with self._writing:
            await self._call.write(message)

    async def _read(self) -> None:
        async for message in self._call:
            self._take(message)

    def _take(self, message: scheduler_pb2.AttachResponse) -> None:
        for accepted in message.accepted:
            if call := self._calls.get(accepted.handle):
                self._follow(call, accepted.first_sequence_id)
        for resumed in message.resumed:
            if call := self._calls.get(resumed.handle):
                call.live = [index for index, each in enumerate(resumed.sequences) if not each.finish_reason]
                self._follow(call, resumed.first_sequence_id)
        reasons = {each.sequence_id: from_status(each.status).reason for each in message.sequence_failures}
        for sequence_id in message.finished_sequence_ids:
            for call in self._of_sequence.pop(sequence_id, ()):
                call.on_ended(sequence_id, str(reasons.get(sequence_id, "")))
        for failed in message.failed:
            reason = str(from_status(failed.status).reason)
            for call in [each for each in self._calls.values() if each.request_id == failed.request_id]:
                call.finish(reason)

    def _follow(self, call: _ForeignCall, first_sequence_id: int) -> None:
        call.sequence_ids = {first_sequence_id + index for index in call.live}
        for sequence_id in call.sequence_ids:
            self._of_sequence.setdefault(sequence_id, []).append(call)
        if not call.sequence_ids:
            call.finish("ended before")


class _ForeignCall:
    """What is known of a request: `live` are the indexes of the sequences that have not ended."""

    def __init__(self, request_id: str, live: list[int]) -> None:
        self.request_id = request_id
        self.live = live
        self.sequence_ids: set[int] = set()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reason = "taken"

    def on_ended(self, sequence_id: int, reason: str) -> None:
        """Takes the end of one sequence."""
        self._reason = reason or self._reason
        self.sequence_ids.discard(sequence_id)
        if not self.sequence_ids:
            self.finish(self._reason)

    def finish(self, outcome: str) -> None:
        """Ends the wait for it."""
        if not self.end.done():
            self.end.set_result(outcome)


class Requests:
    """Makes cases: right requests with something changed, by one random generator."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._num = 0

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.choice((1, 4, 16, 60)))]

    def _sampling(self) -> sampling_pb2.SamplingParams:
        params = sampling_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=self._num, logit_bias={5: 1.0})
        params.allowed_token_ids.extend(range(100 * self._rng.randrange(2)))
        params.bad_token_sequences.add(token_ids=[7, 8])
        if self._rng.random() < 0.2:
            params.logprobs = params.prompt_logprobs = 2
        if self._rng.random() < 0.1:
            params.grammar = 'start: "a" /[b-d]+/'
        return params

    def _outputs(self, n: int) -> list[list[int]]:
        """Tokens of each sequence that are said to have come."""
        length = self._rng.randrange(MAX_TOKENS)
        return [[self._rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(n)]

    def _spoil(self, *columns: Any) -> None:
        """Puts an id that the vocabulary does not have among others, sometimes."""
        column = self._rng.choice(columns)
        if len(column) and self._rng.random() < 0.3:
            column[self._rng.randrange(len(column))] = self._rng.choice(FOREIGN_IDS)

    def _change(self, message: Any) -> Any:
        changed = mutate(message, self._rng) if self._rng.random() < 0.8 else message
        # What is no message any more reaches no service.
        return self._change(message) if changed is None else changed

    def make_public(self) -> inference_pb2.StreamGenerateRequest | inference_pb2.ResumeGenerateRequest:
        """Makes what a client sends: a new request, or a resume with the tokens received so far."""
        rng, n = self._rng, self._rng.choice((1, 1, 2))
        self._num += 1
        spec = inference_pb2.GenerationSpec(sampling=self._sampling(), n=n, model="demo", return_token_ids=True)
        spec.stop.CopyFrom(sampling_pb2.StopCriteria(max_tokens=MAX_TOKENS, stop_strings=["end"], stop_token_ids=[9]))
        spec.token_ids.ids.extend(self._prompt())
        if rng.random() < 0.2:
            spec.beam_search.width = 3
        if rng.random() < 0.4:
            self._spoil(spec.token_ids.ids, spec.stop.stop_token_ids, spec.sampling.allowed_token_ids)
            changed = self._change(inference_pb2.StreamGenerateRequest(spec=spec))
        else:
            resume = inference_pb2.ResumeGenerateRequest(spec=spec, seed=7)
            for index, token_ids in enumerate(self._outputs(n)):
                resume.positions.add(index=index, num_tokens=len(token_ids), token_ids=token_ids)
            self._spoil(*(position.token_ids for position in resume.positions))
            changed = self._change(resume)
        self._bound_public(changed)
        return changed

    def _bound_public(self, message: Any) -> None:
        """Gives a request a name of its own, mostly, and little to do."""
        if self._rng.random() < 0.95:
            holder = message if hasattr(message, "request_id") else message.spec
            holder.request_id, message.spec.request_id = f"c{self._num}", f"c{self._num}"
        message.spec.stop.max_tokens = min(message.spec.stop.max_tokens, MAX_TOKENS)
        if MAX_N < message.spec.n <= 64:
            message.spec.n = MAX_N

    def make_foreign(self) -> scheduler_pb2.AddRequest:
        """Makes what a gateway sends: a new request, or one that ran before."""
        rng, n = self._rng, self._rng.choice((1, 1, 2))
        self._num += 1
        draft = Draft(prompt_token_ids=self._prompt(), n=n, max_tokens=MAX_TOKENS, digest=b"d")
        add, submission = draft.add, draft.submission
        draft.sampling.CopyFrom(self._sampling())
        submission.stop_token_ids.append(9)
        submission.max_queue_time.seconds = submission.remaining_time.seconds = 60
        if rng.random() < 0.15:
            submission.beam_search.width = 3
        if rng.random() < 0.5:
            for token_ids in self._outputs(n):
                add.resubmission.sequences.add(token_ids=token_ids)
            self._spoil(*(sequence.token_ids for sequence in add.resubmission.sequences))
        if rng.random() < 0.05:
            draft.pooling.kind = pooling_pb2.POOLING_KIND_LAST
        if rng.random() < 0.05:
            name = {"lora_id": rng.randrange(1, 2**16), "name": "a", "path": "/nowhere", "digest": f"{self._num:064x}"}
            submission.lora.CopyFrom(scheduler_pb2.LoraAdapter(**name))
        self._spoil(submission.prompt_token_ids, submission.stop_token_ids, draft.sampling.allowed_token_ids)
        part = rng.choice(("add", "submission", "sampling", "pooling"))
        setattr(draft, part, self._change(getattr(draft, part)))
        submission = draft.submission
        draft.add.handle = self._num
        submission.request_id = submission.request_id if rng.random() < 0.02 else f"f{self._num}"
        submission.max_tokens = min(submission.max_tokens, MAX_TOKENS)
        submission.n = min(submission.n, MAX_N) if submission.n <= 64 else submission.n
        return draft.build()

    def make_other(self) -> scheduler_pb2.ResumeRequest | scheduler_pb2.AbortRequest:
        """Makes a resume or an abort of a request that may be there."""
        rng = self._rng
        name = f"{rng.choice('cf')}{max(self._num - rng.randrange(60), 0)}"
        self._num += 1
        if rng.random() < 0.5:
            return scheduler_pb2.ResumeRequest(request_id=name, handle=self._num)
        abort = scheduler_pb2.AbortRequest(request_id=name, reason=rng.choice((0, 1, 2)), num_tokens=rng.randrange(9))
        if rng.random() < 0.5:
            abort.sequence_index = rng.choice((0, 1, 2**32 - 1))
        return abort


class Run:
    """One run at the services: cases some at a time, beside the innocent stream."""

    def __init__(
        self, report: Report, stub: inference_pb2_grpc.InferenceServiceAsyncStub, foreign: ForeignGateway
    ) -> None:
        self._report = report
        self._stub = stub
        self._foreign = foreign
        self._slots = asyncio.Semaphore(NUM_AT_A_TIME)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Sends all cases, and waits for their ends."""
        requests, rng = Requests(self._report.rng), self._report.rng
        for _ in range(self._report.num_cases):
            await self._slots.acquire()
            drawn = rng.random()
            if drawn < 0.45:
                message: Any = requests.make_public()
                case = self._call(message)
            elif drawn < 0.9:
                message = requests.make_foreign()
                case = self._foreign.add(message)
            else:
                message = requests.make_other()
                case = self._tell(message)
            task = asyncio.create_task(self._count(message, case))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.wait(self._tasks)

    async def _count(self, message: Message, case: Coroutine[Any, Any, str]) -> None:
        try:
            async with asyncio.timeout(CASE_SECONDS):
                outcome = await case
        except TimeoutError:
            outcome = NO_END
        except Exception as error:  # noqa: BLE001 - a bug of the fuzz, or of what it reads
            self._report.surprise(error)
            outcome = "unknown"
        finally:
            self._slots.release()
        self._report.outcomes[outcome] += 1
        if outcome in (*NEVER, NO_END):
            self._report.surprises[outcome] += 1
            self._report.notes.append(f"{outcome}: {type(message).__name__} {text_format.MessageToString(message)}")

    async def _call(self, message: Any) -> str:
        is_resume = isinstance(message, inference_pb2.ResumeGenerateRequest)
        call: Any = self._stub.ResumeGenerate(message) if is_resume else self._stub.StreamGenerate(message)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return str(from_rpc_error(error).reason)
        return "taken"

    async def _tell(self, message: scheduler_pb2.ResumeRequest | scheduler_pb2.AbortRequest) -> str:
        if isinstance(message, scheduler_pb2.ResumeRequest):
            return await self._foreign.resume(message)
        return await self._foreign.abort(message)


async def disturb(report: Report, system: System) -> None:
    """Runs cases at services that run, and leaves them as they were."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(system.grpc_target))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(system.grpc_target))
        foreign = await stack.enter_async_context(ForeignGateway(system.scheduler_address))
        innocent = Innocent(client)
        await innocent.run()
        before = await foreign.find_epoch()
        repeating = asyncio.create_task(innocent.repeat())
        await Run(report, inference_pb2_grpc.InferenceServiceStub(channel), foreign).run()
        assert not foreign.reader.done(), "the scheduler has ended a gateway's stream"
        repeating.cancel()
        await asyncio.wait({repeating})
        await innocent.run()
        num_lost = await foreign.find_epoch() - before
    if num_lost:
        report.surprises["epochs lost"] += num_lost
    for wrong in innocent.wrong:
        report.surprises[f"the innocent stream: {wrong}"[:100]] += 1
    report.notes.append(
        f"epochs lost: {num_lost}; {innocent.num_answers} answers of the innocent stream, {len(innocent.wrong)} wrong, "
        f"worst gap {innocent.worst_gap_seconds:.3f} s"
    )


async def fuzz_disturbances(report: Report) -> None:
    """Half-valid requests, resumes and resubmissions into the three services, beside an innocent stream."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        flags = ("--num-threads", "1", "--worker-lora-root", folder)
        with System(DEMO, Path(folder) / "logs", FLAGS, worker_flags=flags) as system:
            await disturb(report, system)
