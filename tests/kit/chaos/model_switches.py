"""Three models behind one address and places for two: requests in random order while any process is killed.

Each request is run by itself first. Then many run at a time, for all models in random order, and after every few
answers a process is killed: the gateway, or a scheduler or worker of any model that is loaded, loading or leaving.
Every answer must be the undisturbed one. Requests, their order and who is killed are functions of the seed; what the
machine makes of them is not.

    python -m tests.kit.chaos.model_switches --requests 200 --kills 40
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard import AsyncClient
from blockyard.configuration import SystemConfiguration
from blockyard.local.local_system import LocalSystem
from blockyard.local.model_manager import managed_models
from blockyard.local.running_system import PATIENT, PRIVATE
from blockyard.local.supervisor import Supervisor
from blockyard.settings import resolve
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import Known, noted_losses, run_alone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

MODELS = ("llama", "qwen2", "qwen3")
NUM_PLACES = 2
SETTINGS: dict[str, Any] = {
    **PRIVATE,
    "dtype": "float32",
    "num_threads": 1,
    "num_device_blocks": 320,
    "num_host_blocks": 64,
    "max_loaded_models": NUM_PLACES,
    # The system has one gateway, which brings all requests that there are.
    "reattach_seconds": 1.0,
    "log_level": "info",
}
# Time for all answers after the last kill.
FINISH_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        num_requests: of all models together; `num_streams` of them at a time.
        num_different: different requests of each model.
        num_kills: spread evenly over the answers.
        turn_seconds: --model-turn-seconds.
    """

    seed: int = 1
    num_requests: int = 200
    num_streams: int = 12
    num_different: int = 9
    num_kills: int = 40
    turn_seconds: float = 3.0


@dataclass(slots=True)
class Report:
    """What a run showed. It is good where `failures` is empty."""

    plan: Plan
    seconds: float = 0.0
    num_answers: Counter[str] = field(default_factory=Counter[str])
    num_tokens: int = 0
    num_resumes: int = 0
    num_recoveries: int = 0
    kills: Counter[str] = field(default_factory=Counter[str])
    loads: Counter[str] = field(default_factory=Counter[str])
    longest_wait_seconds: float = 0.0
    failures: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{count} x {name}" for name, count in sorted(counter.items())) or "none"

        lines = [
            f"seed {self.plan.seed}: {self.seconds:.1f} s, {self.plan.num_streams} streams at a time",
            f"answers: {counts(self.num_answers)}; {self.num_tokens} tokens, resumed by clients: {self.num_resumes}",
            f"kills: {counts(self.kills)}",
            f"models loaded: {counts(self.loads)}; recovered events: {self.num_recoveries}",
            f"longest wait for a first token: {self.longest_wait_seconds:.2f} s",
            *(f"FAILED: {failure}" for failure in self.failures),
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Switched:
    """A running system, and how often each of its models was loaded."""

    system: LocalSystem
    supervisor: Supervisor
    loads: Counter[str]

    def kill(self, draw: random.Random) -> str:
        """Kills one of the processes that run, and returns its name."""
        child = draw.choice([child for child in self.supervisor.children if child.is_running])
        # It may just have ended by itself.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        return child.service.name


@asynccontextmanager
async def switched_system(log: Path, **settings: Any) -> AsyncGenerator[Switched]:
    """Runs a system with all models inside the block; its log goes to a file."""
    configurations = [
        resolve(SystemConfiguration, {**SETTINGS, **settings, "model": str(tiny_model(name))}, environment={})
        for name in MODELS
    ]
    system = LocalSystem(*configurations)
    loads: Counter[str] = Counter()
    with log.open("w") as file:

        def write_line(line: str) -> None:
            print(line, file=file, flush=True)
            if " model loaded " in line:
                loads[line.partition(":")[0]] += 1

        supervisor = Supervisor(
            system.make_services(), system.are_all_ready, write_line=write_line, environment=system.make_environment()
        )
        try:
            assert await supervisor.start()
            async with managed_models(system, supervisor):
                yield Switched(system, supervisor, loads)
        finally:
            await supervisor.stop()
            await system.close()


class SwitchRun:
    """One run of a plan on a system that has just been started."""

    def __init__(self, plan: Plan, switched: Switched) -> None:
        self.report = Report(plan, loads=switched.loads)
        self._plan = plan
        self._switched = switched
        self._draw = random.Random(f"{plan.seed}/switches")
        self._num_done = 0

    async def run(self) -> Report:
        """Runs it. What goes wrong stands in the report."""
        known: dict[str, list[Known]] = {}
        target = self._switched.system.endpoints.local
        async with AsyncClient(target, retry=PATIENT) as client:
            requests = make_requests(self._plan.seed, self._plan.num_different * len(MODELS))
            for number, name in enumerate(MODELS):
                named = [
                    replace(each, options={**each.options, "model": name}) for each in requests[number :: len(MODELS)]
                ]
                known[name] = await run_alone(client, named)
        self._switched.loads.clear()
        order = [name for name in MODELS for _ in range(-(-self._plan.num_requests // len(MODELS)))]
        self._draw.shuffle(order)
        turns = [(number, name, self._draw.choice(known[name])) for number, name in enumerate(order)]
        begin = time.monotonic()
        with noted_losses() as losses:
            async with AsyncClient(target, retry=PATIENT) as client:
                streams = [asyncio.create_task(self._read(turns, client)) for _ in range(self._plan.num_streams)]
                await self._finish(streams)
        self.report.failures += losses
        self.report.seconds = time.monotonic() - begin
        return self.report

    async def _finish(self, streams: list[asyncio.Task[None]]) -> None:
        """Waits for all streams, as long as some of them get on."""
        pending = set(streams)
        while pending:
            num_done = self._num_done
            _, pending = await asyncio.wait(pending, timeout=FINISH_SECONDS)
            if pending and self._num_done == num_done:
                self.report.failures.append(f"no answer has ended for {FINISH_SECONDS:g} s")
                break
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _read(self, turns: list[tuple[int, str, Known]], client: AsyncClient) -> None:
        while turns:
            number, name, known = turns.pop()
            transcript, wrong = await known.check(client, f"{self._plan.seed}-{number}")
            report = self.report
            report.num_answers[name] += 1
            report.num_tokens += transcript.num_tokens
            report.num_resumes += transcript.num_resumes
            report.num_recoveries += len(transcript.recoveries)
            report.longest_wait_seconds = max(report.longest_wait_seconds, transcript.first_token_seconds)
            if wrong:
                report.failures.append(f"{name}: {wrong}")
            self._num_done += 1
            self._kill()

    def _kill(self) -> None:
        """Kills as many as are due by now."""
        plan = self._plan
        while self.report.kills.total() < plan.num_kills * self._num_done // plan.num_requests:
            self.report.kills[self._switched.kill(self._draw)] += 1


async def run_switches(plan: Plan, log: Path) -> Report:
    """Runs a plan on a system of its own."""
    async with switched_system(log, model_turn_seconds=plan.turn_seconds) as switched:
        return await SwitchRun(plan, switched).run()


async def measure(log: Path, num_rounds: int) -> str:
    """Measures what a first token takes: of a loaded model, by a load, and by a switch, in which another one ends."""
    seconds: dict[str, list[float]] = {"loaded": [], "load alone": [], "switch": []}

    async def ask(client: AsyncClient, model: str, kind: str) -> None:
        begin = time.monotonic()
        await client.generate([5, 6, 7], model=model, max_tokens=1, temperature=0.0)
        seconds[kind].append(time.monotonic() - begin)

    for _ in range(num_rounds):
        async with switched_system(log) as switched, AsyncClient(switched.system.endpoints.local) as client:
            for model in MODELS[:NUM_PLACES]:
                await ask(client, model, "load alone")
                await ask(client, model, "loaded")
            await ask(client, MODELS[NUM_PLACES], "switch")
            await ask(client, MODELS[0], "switch")
    told = [
        f"{kind} {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f})" for kind, each in seconds.items()
    ]
    return "first token, median of a model that is: " + ", ".join(told)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0, help="measure switches in so many rounds, instead of a run")
    options = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="switches-")) / "log"
    sys.stdout.write(f"log in {log}\n")
    if options.rounds:
        sys.stdout.write(f"{asyncio.run(measure(log, options.rounds))}\n")
        return
    plan = Plan(seed=options.seed, num_requests=options.requests, num_kills=options.kills)
    report = asyncio.run(run_switches(plan, log))
    sys.stdout.write(f"{report}\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
