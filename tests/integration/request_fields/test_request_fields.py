"""Each field of AddRequest holds what no gateway should send, beside an innocent request, at real services.

Scheduler and worker run in this process, with tiny models. No value ends an epoch, and the innocent one always gets the
tokens that it gets alone.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.scheduler.v1 import scheduler_pb2
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.server import Server as Scheduler
from tests.integration.request_fields.table import MAX_MODEL_LEN, ROWS, VOCAB_SIZE, Base, Refuser, Row
from tests.kit.fakes.drafts import Draft
from tests.kit.fakes.token_client import Stream, TokenClient
from tests.kit.kernels.pooling_models import pooling_model
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.driver import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
    from pathlib import Path

    from google.protobuf.descriptor import Descriptor

    from blockyard.errors import Reason

Case = tuple[Row, Any]
NUM_AT_A_TIME = 8
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
MAX_TOKENS = 8


def find_paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """Finds the fields of our own messages, to the last; those of others, and maps, are one field each."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or not inner.full_name.startswith("blockyard.") or inner.GetOptions().map_entry:
            yield prefix + field.name
        else:
            yield from find_paths(inner, f"{prefix}{field.name}.")


def test_the_table_has_every_field() -> None:
    opaque = {"submission", "sampling", "pooling"}
    messages = {
        "": (scheduler_pb2.AddRequest, scheduler_pb2.Submission),
        "sampling.": (sampling_pb2.SamplingParams,),
        "pooling.": (pooling_pb2.Pooling,),
    }
    paths = {path for prefix, each in messages.items() for one in each for path in find_paths(one.DESCRIPTOR, prefix)}
    assert {row.path for row in ROWS} == paths - opaque


class System:
    """A scheduler, its worker, and one gateway of token ids."""

    def __init__(self, scheduler: Scheduler, client: TokenClient, adapter: scheduler_pb2.LoraAdapter | None) -> None:
        self.scheduler = scheduler
        self.client = client
        self._adapter = adapter
        self._num = 0

    async def generate(self, base: Base) -> list[list[int]]:
        """Answers an innocent request."""
        return await self.client.result(await self.send(self.make(base)))

    def make(self, base: Base) -> Draft:
        """Makes a request with nothing wrong."""
        self._num += 1
        pools = base in (Base.POOLED, Base.MISPLACED)
        draft = Draft(
            self._num,
            request_id=f"r{self._num}",
            prompt_token_ids=PROMPT,
            n=1 if pools or base is Base.ADAPTED else 2,
            max_tokens=0 if pools else MAX_TOKENS,
            digest=b"digest",
        )
        add, submission = draft.add, draft.submission
        draft.sampling.temperature, draft.sampling.seed = 0.0, 3
        match base:
            case Base.SEARCHED:
                submission.beam_search.width = 3
            case Base.ADAPTED:
                assert self._adapter is not None
                submission.lora.CopyFrom(self._adapter)
            case Base.LOST:
                submission.lora.name, submission.lora.path, submission.lora.digest = "lost", "/nowhere", "0" * 64
            case Base.RESUBMITTED:
                for _ in range(2):
                    add.resubmission.sequences.add(token_ids=[17, 18])
            case Base.ENDED:
                for _ in range(2):
                    add.resubmission.sequences.add(token_ids=[17], finish_reason=sampling_pb2.FINISH_REASON_STOP)
            case Base.POOLED | Base.MISPLACED:
                draft.pooling.kind = pooling_pb2.POOLING_KIND_LAST
            case Base.PLAIN:
                pass
        return draft

    async def send(self, draft: Draft) -> Stream:
        """Sends a request as it is."""
        add, name = draft.build(), draft.submission.request_id
        stream = self.client.streams[name] = Stream(name, min(draft.submission.n, 300))
        if add.HasField("resubmission"):
            for index, sequence in enumerate(add.resubmission.sequences):
                stream.token_ids[index] = list(sequence.token_ids)
                if sequence.finish_reason:
                    stream.reasons[index] = sequence.finish_reason
        await self.client._write(scheduler_pb2.AttachRequest(add=[add]))
        return stream

    async def check(self, cases: Sequence[Case], alone: list[list[int]], innocent: Base) -> list[str]:
        """Sends some values beside an innocent request. Returns what is not as their rows say."""
        sent = [(case, await self.send(self._make_wrong(case))) for case in cases]
        other = await self.send(self.make(innocent))
        wrong: list[str] = []
        for (row, value), stream in sent:
            await self.client.wait_until(lambda stream=stream: is_answered(stream))
            found = find_refuser(stream)
            if found != (row.refuser, row.reason):
                wrong.append(f"{row.path} = {value!r:.60}, {row.base.value}: refused by {found[0].value}: {found[1]}")
        if await self.client.result(other) != alone:
            wrong.append(f"an innocent request got other tokens beside {cases!r:.2000}")
        [engine] = self.scheduler.service.engines
        if engine.replica.epoch != 1:
            wrong.append(f"epoch {engine.replica.epoch} after {cases!r:.2000}")
        return wrong

    def _make_wrong(self, case: Case) -> Draft:
        row, value = case
        draft = self.make(row.base)
        draft.put(row.path, value)
        return draft


def is_answered(stream: Stream) -> bool:
    """Tells whether all has come of a request, of which some may have been known before."""
    return stream.error is not None or (stream.first_sequence_id is not None and stream.is_done)


def find_refuser(stream: Stream) -> tuple[Refuser, Reason | None]:
    """Finds who refused a request, and why."""
    if stream.error is not None:
        return Refuser.SCHEDULER, stream.error.reason
    if stream.errors and stream.first_sequence_id is not None:
        return Refuser.WORKER, next(iter(stream.errors.values())).reason
    return Refuser.NOBODY, None


@asynccontextmanager
async def running(folder: Path, model: Path, *, num_loras: int = 0) -> AsyncIterator[System]:
    """Starts the services of a model, with one adapter where there is room for some."""
    base = SchedulerConfiguration()
    service = replace(
        base.service,
        scheduler_address=f"unix:{folder}/s",
        worker_address=f"unix:{folder}/w",
        debug_integrity=True,
        reattach_seconds=0.0,
    )
    configuration = replace(
        base,
        model=replace(base.model, model=str(model)),
        device=replace(base.device, device="cpu", dtype="float32"),
        cache=replace(base.cache, num_device_blocks=200, num_host_blocks=20),
        scheduler=replace(base.scheduler, max_model_len=MAX_MODEL_LEN),
        lora=replace(base.lora, max_loras=num_loras, max_lora_rank=8),
        service=service,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_worker(folder, worker_lora_root=str(folder)))
        scheduler = Scheduler(configuration)
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        client = await stack.enter_async_context(TokenClient(service.scheduler_address))
        await client.wait_until_ready()
        adapter = None
        if num_loras:
            path = make_tiny_adapter(folder / "adapter", model, seed=5, rank=4)
            await scheduler.service.loras.load("adapter", str(path))
            await client.wait_until(lambda: client.loras)
            adapter = client.loras["adapter"]
        yield System(scheduler, client, adapter)


async def check_rows(system: System, rows: Iterable[Row], innocent: Base) -> None:
    """Checks all values of rows, some at a time. Raises AssertionError."""
    alone = await system.generate(innocent)
    assert system.client.facts is not None
    assert system.client.facts.vocab_size <= VOCAB_SIZE
    cases = [(row, value) for row in rows for value in row.values]
    wrong: list[str] = []
    for begin in range(0, len(cases), NUM_AT_A_TIME):
        wrong += await system.check(cases[begin : begin + NUM_AT_A_TIME], alone, innocent)
    assert not wrong, "\n".join(wrong)
    [engine] = system.scheduler.service.engines
    assert engine.breaker.num_unsound_epochs == 0


async def test_each_value_is_refused_by_the_one_who_must_and_costs_no_other_request(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.base is not Base.POOLED]
    async with running(tmp_path, tiny_model("llama"), num_loras=2) as system:
        await check_rows(system, rows, Base.PLAIN)


async def test_so_it_is_where_a_model_makes_numbers(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.base is Base.POOLED]
    async with running(tmp_path, pooling_model("qwen3_embedding")) as system:
        await check_rows(system, rows, Base.POOLED)
