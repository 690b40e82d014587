"""Whole-batch throughput of the worker alone and of the whole system, against what this machine could do at best.

    python benchmarks/throughput.py [--model llama-135m] [--concurrency 1 8 32 64] [--rounds 5] [--write]

In each round: the machine's ceilings; then, for each number of requests, the worker by itself (the same steps, no
services) and the whole system with its client on the same processors, which reads whole answers (generate) or streams;
then one long prompt. The bandwidth of a shared machine swings within seconds: it is measured before and after every one
of these, and that one's ideal is the mean of both. Figures are medians over the rounds, with the least and the most.
Everything is greedy, of random ids, without ends, and every prompt is new. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import ceilings, onednn
from benchmarks.kit import ideal, models, record
from benchmarks.kit.figures import Spread, round_figures, spread_of
from benchmarks.kit.throughput_report import report
from benchmarks.kit.whole_system import Api, WholeSystem
from benchmarks.kit.worker_alone import BLOCK_SIZE, Settings, WorkerAlone
from benchmarks.kit.workload import FreshWorkloads, Workload, measure_rate
from blockyard.service import grpc_environment
from blockyard_kernels.select import CPU_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kernels.ceilings import Ceilings

CEILING_SECONDS = 1.5
BANDWIDTH_SECONDS = 0.3
WARM_UP_TOKENS = 8
# The worker's memory: so many times what it must hold, and something for its program.
MEMORY_FACTOR, MEMORY_BYTES = 1.25, 300e6


@dataclass(slots=True)
class Samples:
    """One number of requests: tokens a second in each round, and CPU seconds per 1,000 tokens of each process.

    `ideals`: what would have been the ideal while each of the three was measured.
    """

    ideals: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    alone: list[float] = field(default_factory=list[float])
    generate: list[float] = field(default_factory=list[float])
    stream: list[float] = field(default_factory=list[float])
    cpu: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])

    def note_cpu(self, api: Api, spent: Counter[str], num_tokens: int) -> None:
        """Takes the CPU seconds that the processes spent on so many tokens."""
        for name, seconds in spent.items():
            self.cpu.setdefault(api, {}).setdefault(name, []).append(1e3 * seconds / num_tokens)


@dataclass(slots=True)
class Prefill:
    """One long prompt: seconds in each round."""

    ideal: list[float] = field(default_factory=list[float])
    alone: list[float] = field(default_factory=list[float])
    system: list[float] = field(default_factory=list[float])


class Bench:
    """A running system and a worker alone, and what was measured of them so far."""

    def __init__(self, options: argparse.Namespace, system: WholeSystem, alone: WorkerAlone) -> None:
        self._options = options
        self._system = system
        self._alone = alone
        self.shape = ideal.Shape.read(Path(options.folder))
        self.ceilings: list[Ceilings] = []
        self.samples = {num_requests: Samples() for num_requests in options.concurrency}
        self.prefill = Prefill()
        self._workloads = FreshWorkloads(self.shape.vocab_size)

    def _batches(self, num_requests: int, num_output_tokens: int) -> Iterator[Workload]:
        return self._workloads.of(num_requests, self._options.prompt_tokens, num_output_tokens)

    async def warm_up(self) -> None:
        """Runs a short batch of each size everywhere."""
        for num_requests in self.samples:
            batches = self._batches(num_requests, WARM_UP_TOKENS)
            self._alone.run(next(batches))
            for api in Api:
                await self._system.run(next(batches), api)

    async def round(self, number: int) -> None:
        """Measures everything once; every second round in the other order."""
        options = self._options
        self.ceilings.append(ceilings.measure(options.num_threads or None, CEILING_SECONDS))
        machine = ideal.machine_for(self.ceilings[-1], options.dtype, options.quantization)
        measurements = {
            "alone": self._measure_alone,
            "generate": self._measure_generate,
            "stream": self._measure_stream,
        }
        names = list(measurements) if number % 2 == 0 else list(reversed(measurements))
        for num_requests, samples in self.samples.items():
            for name in names:
                before = self._ideal_seconds(machine, num_requests)
                await measurements[name](num_requests)
                seconds = (before + self._ideal_seconds(machine, num_requests)) / 2
                samples.ideals.setdefault(name, []).append(num_requests * options.output_tokens / seconds)
            print(f"round {number + 1}, {num_requests} requests: {_last(samples)}", file=sys.stderr, flush=True)
        self.prefill.ideal.append(ideal.prompt_seconds(self.shape, machine, options.prefill_tokens))
        await self._measure_prefill()

    def _ideal_seconds(self, machine: ideal.Machine, num_requests: int) -> float:
        """How long a batch would take at best with the bandwidth of this moment."""
        options = self._options
        bandwidth = ceilings.measure_bandwidth(self.ceilings[-1].num_threads, BANDWIDTH_SECONDS).best
        now = replace(machine, bandwidth=bandwidth)
        return ideal.run_seconds(self.shape, now, num_requests, options.prompt_tokens, options.output_tokens)

    async def _measure_alone(self, num_requests: int) -> None:
        async def run(workload: Workload) -> float:
            return self._alone.run(workload)

        batches = self._batches(num_requests, self._options.output_tokens)
        self.samples[num_requests].alone.append(await measure_rate(batches, run, self._options.seconds))

    async def _measure_generate(self, num_requests: int) -> None:
        self.samples[num_requests].generate.append(await self._measure_system(num_requests, Api.GENERATE))

    async def _measure_stream(self, num_requests: int) -> None:
        self.samples[num_requests].stream.append(await self._measure_system(num_requests, Api.STREAM))

    async def _measure_system(self, num_requests: int, api: Api) -> float:
        spent, num_tokens = Counter[str](), 0

        async def run(workload: Workload) -> float:
            nonlocal num_tokens
            done = await self._system.run(workload, api)
            spent.update(done.cpu_seconds)
            num_tokens += workload.num_tokens
            return done.seconds

        batches = self._batches(num_requests, self._options.output_tokens)
        rate = await measure_rate(batches, run, self._options.seconds)
        self.samples[num_requests].note_cpu(api, spent, num_tokens)
        return rate

    async def _measure_prefill(self) -> None:
        """The best of three, everywhere: a single prompt is short."""
        batches = self._workloads.of(1, self._options.prefill_tokens, 1)
        self.prefill.alone.append(min(self._alone.run(next(batches)) for _ in range(3)))
        runs = [await self._system.run(next(batches)) for _ in range(3)]
        self.prefill.system.append(min(run.seconds for run in runs))


def _last(samples: Samples) -> str:
    last = ((name, getattr(samples, name)[-1], ideals[-1]) for name, ideals in sorted(samples.ideals.items()))
    return ", ".join(f"{name} {rate:.1f} of {ideal:.1f}" for name, rate, ideal in last) + " tok/s"


# The results.


def summarize(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """All that was measured, in medians and extremes."""
    return {
        "ceilings": summarize_ceilings(bench.ceilings),
        "requests": {str(number): summarize_samples(samples) for number, samples in bench.samples.items()},
        "prefill": {
            "num_tokens": options.prefill_tokens,
            "seconds_alone": spread_of(bench.prefill.alone),
            "share_alone": spread_of(bench.prefill.ideal, bench.prefill.alone),
            "share_system": spread_of(bench.prefill.ideal, bench.prefill.system),
        },
    }


def summarize_ceilings(measured: list[Ceilings]) -> dict[str, Any]:
    """The spread over the rounds of each ceiling's best pass."""
    summary: dict[str, Any] = {"bandwidth": spread_of([each.bandwidth.best for each in measured])}
    summary |= {kind: spread_of([each.rate(kind).best for each in measured]) for kind in ceilings.KINDS}
    rates = {name: spread_of([each.rates[name].best for each in measured]) for name in measured[0].rates}
    return {"num_threads": measured[0].num_threads, **summary, "instructions": rates}


def summarize_samples(samples: Samples) -> dict[str, Any]:
    """One number of requests: rates, shares of the ideal, and what the services keep of the worker's rate."""
    rates: dict[str, Spread] = {name: spread_of(getattr(samples, name)) for name in ("alone", *Api)}
    summary = {"tokens_per_second": {"ideal": spread_of(list(chain(*samples.ideals.values()))), **rates}}
    summary["share_of_ideal"] = {name: spread_of(getattr(samples, name), samples.ideals[name]) for name in rates}
    summary["system_over_alone"] = {api: spread_of(getattr(samples, api), samples.alone) for api in Api}
    cpu = {api: {name: spread_of(values) for name, values in by.items()} for api, by in samples.cpu.items()}
    return {**summary, "cpu_seconds_per_1000_tokens": cpu}


def summarize_memory(bench: Bench, settings: Settings, peak_bytes: int) -> dict[str, float]:
    """The worker's peak, and the most that it may be."""
    shape, item = bench.shape, ideal.ITEM_BYTES
    weights = shape.num_weights * item[settings.dtype]
    if settings.quantization:
        # The embedding's table is read by rows, and is not quantized.
        products = shape.num_layer_weights + shape.num_head_weights
        table = shape.num_head_weights
        weights = products * item[settings.quantization] + table * item[settings.dtype]
    pool = settings.num_device_blocks * settings.block_size * shape.num_kv_elements * item[settings.dtype]
    limit = MEMORY_FACTOR * (weights + pool) + MEMORY_BYTES
    return {"peak_bytes": peak_bytes, "weights_bytes": weights, "kv_pool_bytes": pool, "limit_bytes": limit}


def measure_onednn(options: argparse.Namespace) -> dict[str, float]:
    """oneDNN on this model's matrices, in a process of its own, with which its threads end."""
    command = [sys.executable, onednn.__file__, options.folder, "--dtype", options.dtype]
    done = subprocess.run([*command, "--num-threads", str(options.num_threads)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


# The run.


def settings_for(options: argparse.Namespace) -> Settings:
    """Room for the largest batch, and for the long prompt."""
    tokens = max(options.prompt_tokens + options.output_tokens, options.prefill_tokens + 1)
    num_rows = max(options.concurrency)
    blocks_of_a_request = -(-(options.prompt_tokens + options.output_tokens) // BLOCK_SIZE)
    # Beside block 0, an admission leaves a hundredth free, and a block for each sequence that runs.
    num_blocks = num_rows * (blocks_of_a_request + 2) + -(-tokens // BLOCK_SIZE) + 2
    return Settings(
        model=options.folder,
        dtype=options.dtype,
        quantization=options.quantization,
        cpu_kernels=options.cpu_kernels,
        num_threads=options.num_threads,
        num_device_blocks=num_blocks,
        max_num_seqs=num_rows,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min((num_blocks - 1) * BLOCK_SIZE, models.MAX_LEN),
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Starts everything, and measures the rounds."""
    settings, load = settings_for(options), os.getloadavg()[0]
    onednn_rates = measure_onednn(options)
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(WholeSystem(settings))
        alone = stack.enter_context(WorkerAlone(settings))
        bench = Bench(options, system, alone)
        await bench.warm_up()
        for number in range(options.rounds):
            await bench.round(number)
        return {
            "settings": {**asdict(settings), "model": Path(options.folder).name, "load": load, **alone.facts},
            "workload": {name: getattr(options, name) for name in ("prompt_tokens", "output_tokens", "rounds")},
            "onednn": onednn_rates,
            **summarize(bench, options),
            "memory": summarize_memory(bench, settings, system.peak_memory_bytes()),
            "first_token_seconds": system.first_token_seconds,
        }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `folder` is the model's, made if it is one of benchmarks/kit/models.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8",), default="")
    parser.add_argument("--cpu-kernels", choices=CPU_KERNELS, default="auto", help="instruction set of the worker")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, default=1024, help="of the one long prompt")
    parser.add_argument("--seconds", type=float, default=2.0, help="repeat each measurement of a round for so long")
    parser.add_argument("--num-threads", type=int, default=0, help="0: as the worker chooses, ceilings on all")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument(
        "--write", action="store_true", help="keep this run in benchmarks/results/throughput-MODEL.json"
    )
    options = parser.parse_args(arguments)
    named = options.model in models.RECIPES
    options.folder = str(models.make_model(options.model) if named else Path(options.model).resolve())
    return options


def main() -> None:
    """Measures, prints, and writes with --write."""
    # The client is this process: it costs what `blockyard bench` does.
    grpc_environment.prepare()
    options = parse()
    results = round_figures(asyncio.run(run(options)))
    print(report(results))
    if options.write:
        record.append(f"throughput-{results['settings']['model']}", results, options.cpu_kernels)


if __name__ == "__main__":
    main()
