"""The service boundary costs nothing: the step rate through scheduler and sockets, as a share of the worker's own.

    python benchmarks/boundary.py [--seconds 10] [--step-milliseconds 5 1] [--write]

A fake worker's step takes a fixed time, 256 sequences decode. Its ceiling is its device driven inside its own process,
with steps always queued and no message encoded. Against it stand a worker process, a scheduler process and a client on
Attach in the gateway's place, over Unix sockets. Targets: 98 % at 5 ms, 90 % at 1 ms. The codec's and the core's costs
of one steady step stand beside. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from google.protobuf import message as protobuf

from benchmarks.kit import record
from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.progress import encode_progress
from blockyard.contract.codec.scheduling import encode_add
from blockyard.contract.sampling import SamplingParams
from blockyard.contract.scheduling import Add, Progress, Submission
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import GroupSpec, NewSequence, OwnerUpdate, SchedulerOutput, StepResult
from scheduler_service.replicas import codec
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from tests.kit.fakes.fake_device import Device
from tests.kit.fakes.fake_worker import seed_of_payload
from tests.kit.fakes.worker_codec import encode_result
from tests.kit.oracles.token_rows import TokenRows

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SEQUENCES = 256
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
WARM_UP_SECONDS = 1.0
# Of the ceiling: so many that even a busy machine does not leave the device idle.
NUM_QUEUED = 8
TARGETS = {5.0: 0.98, 1.0: 0.90}
PROMPT = tuple(range(32))


# The ceiling: a device and a source of steps in one process.


def make_steps() -> tuple[SchedulerOutput, SchedulerOutput]:
    """The first step (every prompt) and a steady one (every sequence a token), of which the step id is to be set."""
    payload = sampling_pb2.SamplingParams(temperature=0.0, seed=1).SerializeToString()
    spec = GroupSpec("", "", PROMPT, 1, 10**6, 0, frozenset(), payload)
    ids = tuple(range(1, NUM_SEQUENCES + 1))
    new = tuple(NewSequence(i, 0, PROMPT, len(PROMPT), 0, (1, 2), spec) for i in ids)
    first = SchedulerOutput(1, new, (), ids, (len(PROMPT),) * NUM_SEQUENCES)
    # A sixteenth of the sequences fills a block in each step.
    appended = ids[: NUM_SEQUENCES // BLOCK_SIZE]
    steady = SchedulerOutput(2, (), (), ids, (1,) * NUM_SEQUENCES, appended, appended)
    return first, steady


def measure_ceiling(step_seconds: float, seconds: float) -> float:
    """Steps a second that the device reaches when it never waits for its source."""
    first, steady = make_steps()
    answered: list[float] = []
    done = threading.Event()
    end = time.monotonic() + WARM_UP_SECONDS + seconds

    def take(step_id: int, result: Any) -> None:
        assert isinstance(result, StepResult), result
        now = time.monotonic()
        answered.append(now)
        if now < end:
            device.submit(step_id + NUM_QUEUED, replace(steady, step_id=step_id + NUM_QUEUED))
        else:
            done.set()

    device = Device(TokenRows(VOCAB_SIZE, seed_of_payload).execute, take, step_seconds)
    device.submit(1, first)
    for number in range(2, NUM_QUEUED + 1):
        device.submit(number, replace(steady, step_id=number))
    done.wait()
    device.close()
    return rate_of(answered)


def rate_of(times: list[float]) -> float:
    """Steps a second after the warm-up."""
    kept = [moment for moment in times if moment >= times[0] + WARM_UP_SECONDS]
    return (len(kept) - 1) / (kept[-1] - kept[0])


# The services.


def start(stack: ExitStack, folder: Path, module: str, *flags: str) -> None:
    """Starts a process, which ends with the stack; its log stays in the folder until then."""
    log = stack.enter_context((folder / f"{module}.log").open("wb"))
    process = subprocess.Popen([sys.executable, "-m", module, *flags], cwd=ROOT, stderr=log)

    def end() -> None:
        process.terminate()
        process.wait(20)

    stack.callback(end)


def measure_services(step_seconds: float, seconds: float) -> dict[str, float]:
    """Steps a second of worker and scheduler processes with this process as their gateway, and what the log says."""
    with tempfile.TemporaryDirectory(prefix="by") as name:
        folder = Path(name)
        with ExitStack() as stack:
            worker, scheduler = f"unix:{name}/worker", f"unix:{name}/scheduler"
            num_blocks = NUM_SEQUENCES * (2 + int((seconds + 5) / step_seconds / BLOCK_SIZE))
            options = ["--vocab-size", str(VOCAB_SIZE), "--max-model-len", str(10**6), "--no-strict"]
            pools = ["--num-device-blocks", str(num_blocks), "--step-seconds", str(step_seconds)]
            start(stack, folder, "tests.kit.fakes.fake_worker", "--worker-address", worker, *options, *pools)
            flags = ["--max-num-batched-tokens", str(NUM_SEQUENCES * len(PROMPT)), "--model", "fake"]
            addresses = ["--scheduler-address", scheduler, "--worker-address", worker]
            start(stack, folder, "scheduler_service", *addresses, *flags)
            rate = asyncio.run(asyncio.wait_for(drive(scheduler, seconds), seconds + 60))
        return {"steps_per_second": rate, **logged_costs((folder / "scheduler_service.log").read_text())}


async def drive(address: str, seconds: float) -> float:
    """Attaches as a gateway, fills the batch, and counts the steps of one sequence's tokens."""
    while not Path(address.removeprefix("unix:")).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.05)
    async with internal_channel(address) as channel:
        call: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Attach()
        await call.write(scheduler_pb2.AttachRequest(hello=scheduler_pb2.Hello(gateway_id="benchmark")))
        while not (await next_message(call)).readiness.ready:
            pass
        await call.write(scheduler_pb2.AttachRequest(add=[make_request(i) for i in range(NUM_SEQUENCES)]))
        counted, begin, last = 0, 0.0, 0.0
        first_full = 0.0
        while not begin or last < begin + seconds:
            message = await next_message(call)
            last = time.monotonic()
            if not first_full and len(message.sequence_ids) >= NUM_SEQUENCES:
                first_full = last
            if begin:
                counted += len(message.sequence_ids)
            elif first_full and last > first_full + WARM_UP_SECONDS:
                begin = last
        call.cancel()
    return counted / NUM_SEQUENCES / (last - begin)


async def next_message(call: Any) -> scheduler_pb2.AttachResponse:
    """The next message of a stream that must not end."""
    message = await call.read()
    assert isinstance(message, protobuf.Message), "the stream has ended"
    assert not message.failed, message.failed  # type: ignore[attr-defined]
    return message  # type: ignore[return-value]


def make_request(number: int) -> scheduler_pb2.AddRequest:
    """A request that outlives the measurement."""
    prompt = [(number * 31 + token_id) % VOCAB_SIZE for token_id in PROMPT]
    sampling = SamplingParams(temperature=0.0, seed=number)
    return encode_add(Add(number + 1, Submission(f"r{number}", prompt, 1, sampling, 10**5, 0, ())))


def logged_costs(log: str) -> dict[str, float]:
    """The scheduler's own averages, from the totals that it writes when it stops."""
    fields = dict(part.split("=", 1) for part in log[log.rindex("totals ") :].split() if "=" in part)
    return {"schedule_us": float(fields["schedule_us"]), "update_us": float(fields["update_us"])}


# The codec.


def microseconds(function: Callable[[], object], repeat: int = 9, number: int = 400) -> float:
    """The median CPU time of one call: what else runs on the machine counts as little as it can."""
    runs: list[float] = []
    for _ in range(repeat):
        begin = time.thread_time()
        for _ in range(number):
            function()
        runs.append((time.thread_time() - begin) / number * 1e6)
    return statistics.median(runs)


def measure_codec() -> dict[str, float]:
    """Microseconds of the three messages of one steady step, as the scheduler's process spends them."""
    _, steady = make_steps()
    result = StepResult(2, steady.sequence_ids, tuple(i * 37 % VOCAB_SIZE for i in steady.sequence_ids))
    answer = encode_result(result, 1, 0.001).SerializeToString()
    update = Progress(update=OwnerUpdate(list(result.sequence_ids), list(result.token_ids)))
    decode = worker_pb2.ExecuteModelResponse.FromString

    limits = AnswerLimits(VOCAB_SIZE, 2**20, len(steady.sequence_ids))

    return {
        "encode_step_us": microseconds(lambda: codec.encode_step(steady, 1).SerializeToString()),
        "decode_answer_us": microseconds(lambda: codec.decode_answer(decode(answer), limits)),
        "encode_update_us": microseconds(lambda: encode_progress(update).SerializeToString()),
    }


# The report.


def measure(step_milliseconds: float, seconds: float) -> dict[str, float]:
    """One step time: the services' rate between two ceilings, which show how quiet the machine was."""
    step_seconds = step_milliseconds / 1e3
    before = measure_ceiling(step_seconds, seconds / 2)
    services = measure_services(step_seconds, seconds)
    after = measure_ceiling(step_seconds, seconds / 2)
    ceiling = max(before, after)
    return {
        "step_milliseconds": step_milliseconds,
        "ceiling_steps_per_second": ceiling,
        "ceiling_spread": abs(before - after) / ceiling,
        **services,
        "share": services["steps_per_second"] / ceiling,
        "target": TARGETS.get(step_milliseconds, 0.0),
    }


def report(results: dict[str, Any]) -> str:
    """The results as markdown."""
    machine, costs = results["machine"], results["codec"]
    lines = [
        "# The service boundary",
        "",
        f"{NUM_SEQUENCES} sequences decode; a fake worker's step takes a fixed time; worker, scheduler and client are"
        f" processes on Unix sockets. {machine['cpus']} CPUs, load {machine['load']:.1f}, Python {machine['python']}.",
        "",
        "| step | ceiling, steps/s | through the services, steps/s | share | target | schedule(), µs | update(), µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["steps"]:
        lines.append(
            f"| {row['step_milliseconds']:g} ms | {row['ceiling_steps_per_second']:.1f} | {row['steps_per_second']:.1f}"
            f" | {row['share']:.1%} | {row['target']:.0%} | {row['schedule_us']:.0f} | {row['update_us']:.0f} |"
        )
    total = costs["encode_step_us"] + costs["decode_answer_us"]
    lines += [
        "",
        f"Codec, one steady step: encode the request {costs['encode_step_us']:.1f} µs, decode the answer"
        f" {costs['decode_answer_us']:.1f} µs (together {total:.1f}, target 50); encode the gateway's message"
        f" {costs['encode_update_us']:.1f} µs.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints, and writes with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--step-milliseconds", type=float, nargs="+", default=[5.0, 1.0])
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/boundary.json")
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)
    results = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "codec": measure_codec(),
        "steps": [measure(milliseconds, options.seconds) for milliseconds in options.step_milliseconds],
    }
    print(report(results))
    if options.write:
        record.append("boundary", results)


if __name__ == "__main__":
    main()
