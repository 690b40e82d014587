"""What drafts gain: `--speculation auto` against none, on edits of source code and on text that nothing predicts.

    python benchmarks/edits.py [--model demo llama-135m] [--concurrency 1 8 64] [--rounds 5] [--write]

Both systems run at once, and take turns within each round; one that has nothing to do costs nothing. A ratio is that of
the best rounds of both, which other work on the machine disturbs least; beside it stands the median of the rounds' own
ratios, and that of the CPU time of all processes. There are three workloads, all greedy and blind to ends, of prompts
that share no prefix:

- edits, replayed: the prompt is the code before a commit and its title, and the answer is the code after it, whatever
  the model says (`kit/replaying_worker.py`). This measures the system.
- edits, free: the same prompts, and the model's own answers, as long. This measures system and model. Only with a model
  that has learnt something: one with random weights soon repeats itself, which is easy to draft.
- random, replayed: prompts and answers of random ids, so that no draft is ever right: what speculation costs.

The edits are those of `blockyard bench --workload edits`, in tokens of the demo model, for other models too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import tokenizers

from benchmarks.kit import models, record
from benchmarks.kit.whole_system import WholeSystem
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.workload import FIRST_TOKEN_ID
from blockyard.load.edits import read_edits
from blockyard.service import grpc_environment

DEMO = ROOT / "models" / "demo"
WAYS = ("none", "auto")
# Workload: whether answers are replayed, and the numbers of requests at once.
# A worker that replays decided answers runs every step in Python: only free ones have the steady loop.
WORKLOADS = {
    "edits replayed": (True, (1, 8)),
    "edits free": (False, (1, 8)),
    "random replayed": (True, (1, 8, 64)),
    "random drawn": (False, (1, 8, 64)),
}
FLOORS = {
    ("edits replayed", 1): 3.5,
    ("edits free", 1): 2.0,
    ("edits replayed", 8): 1.3,
    **{(f"random {way}", count): 0.99 for way in ("replayed", "drawn") for count in (1, 8, 64)},
}
NUM_RANDOM_ANSWERS, NUM_RANDOM_TOKENS, NUM_RANDOM_PROMPT_TOKENS = 64, 128, 128
SALT_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """The prompts of a round, and the answers that are replayed to them, or that are as long as others."""

    prompts: list[list[int]]
    answers: list[list[int]]
    is_drawn: bool = False
    """Whether tokens are drawn from all of the vocabulary instead of taking the likeliest."""


class Cases:
    """Makes prompts, no two of which share a prefix, and knows the answers to them."""

    def __init__(self, num_edits: int, seed: int = 0) -> None:
        """`num_edits`: in a round."""
        self._num_edits = num_edits
        tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._draws = random.Random(seed)
        self._edits = [
            (self._encode(tokenizer, edit.make_prompt(0)), self._encode(tokenizer, edit.after)) for edit in read_edits()
        ]
        self._vocabulary = range(FIRST_TOKEN_ID, tokenizer.get_vocab_size())
        random_answers = [self._draws.choices(self._vocabulary, k=NUM_RANDOM_TOKENS) for _ in range(NUM_RANDOM_ANSWERS)]
        self.answers = [*(after for _, after in self._edits), *random_answers]

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def make(self, workload: str, num_requests: int) -> Case:
        """Makes the requests of a round: as many edits as there should be, or as run at once if these are more."""
        if workload.startswith("random"):
            first = len(self._edits)
            numbers = [first + place % NUM_RANDOM_ANSWERS for place in range(max(num_requests, 4))]
            texts = [self._draws.choices(self._vocabulary, k=NUM_RANDOM_PROMPT_TOKENS) for _ in numbers]
        else:
            numbers = self._draws.sample(range(len(self._edits)), max(num_requests, self._num_edits))
            texts = [self._edits[number][0] for number in numbers]
        prompts = [
            [FIRST_TOKEN_ID + number, *self._draws.choices(self._vocabulary, k=SALT_TOKENS), *text]
            for number, text in zip(numbers, texts, strict=True)
        ]
        return Case(prompts, [self.answers[number] for number in numbers], workload == "random drawn")


class Rate(NamedTuple):
    """Tokens for each second, and for each second of CPU time of the services."""

    by_time: float
    by_cpu_time: float


async def run_case(system: WholeSystem, case: Case, num_requests: int, *, replays: bool) -> Rate:
    """Runs a case, so many requests at once."""
    lengths = list(map(len, case.answers))
    seconds, before = 0.0, sum(system.cpu_seconds().values())
    for begin in range(0, len(case.prompts), num_requests):
        some = slice(begin, begin + num_requests)
        taken, answers = await system.run_prompts(case.prompts[some], lengths[some], float(case.is_drawn))
        assert not replays or answers == case.answers[some], "an answer is not the one that was decided"
        seconds += taken
    cpu_seconds = sum(system.cpu_seconds().values()) - before
    return Rate(sum(lengths) / seconds, sum(lengths) / cpu_seconds)


async def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all workloads with one model."""
    folder = DEMO if model == "demo" else models.make_model(model)
    cases = Cases(options.edits)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        answers = Path(place) / "answers.json"
        answers.write_text(json.dumps(cases.answers))
        for replays in (True, False):
            wanted = {
                (name, count): {way: [] for way in WAYS}
                for name, (is_replayed, counts) in WORKLOADS.items()
                for count in counts
                if is_replayed == replays and name in options.workloads and count in options.concurrency
                if name != "edits free" or model == "demo"
            }
            if wanted:
                await _measure_some(str(folder), str(answers) if replays else "", wanted, cases, options)
                results |= {f"{name}, {count}": summarize(rates) for (name, count), rates in wanted.items()}
    return results


async def _measure_some(
    folder: str,
    answers: str,
    wanted: dict[tuple[str, int], dict[str, list[Rate]]],
    cases: Cases,
    options: argparse.Namespace,
) -> None:
    settings = Settings(model=folder, max_model_len=1024, num_device_blocks=1200, num_threads=options.num_threads)
    async with AsyncExitStack() as stack:
        systems = {
            way: await stack.enter_async_context(WholeSystem(settings, answers, speculation=way)) for way in WAYS
        }
        for number in range(-1, options.rounds):
            for (name, count), rates in wanted.items():
                case = cases.make(name, count)
                # Both get the same requests: each system has a prefix cache of its own.
                for way in WAYS if number % 2 else reversed(WAYS):
                    rate = await run_case(systems[way], case, count, replays=bool(answers))
                    if number >= 0:
                        rates[way].append(rate)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)


def summarize(rates: dict[str, list[Rate]]) -> dict[str, float]:
    none, auto = ([rate.by_time for rate in rates[way]] for way in WAYS)
    cpu = [max(rate.by_cpu_time for rate in rates[way]) for way in WAYS]
    return {
        "none_tokens_per_second": round(max(none), 1),
        "auto_tokens_per_second": round(max(auto), 1),
        "ratio_of_best": round(max(auto) / max(none), 3),
        "ratio_by_cpu_time": round(cpu[1] / cpu[0], 3),
        "median_ratio": round(statistics.median(b / a for a, b in zip(none, auto, strict=True)), 3),
    }


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["demo", "llama-135m"], help="demo, or those of kit/models.py")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, help="which ones")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--edits", type=int, default=8, help="how many edits a round has")
    parser.add_argument("--num-threads", type=int, default=0, help="of a worker; 0: as many as it takes by itself")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/edits.json")
    options = parser.parse_args()
    grpc_environment.prepare()
    results = {model: asyncio.run(measure(model, options)) for model in options.model}
    for model, measured in results.items():
        for name, figures in measured.items():
            workload, _, count = name.rpartition(", ")
            floor = FLOORS.get((workload, int(count)))
            print(f"{model}, {name}: ", *(f"{key} {value}" for key, value in figures.items()), f"(floor {floor})")
    if options.write:
        record.append("edits", {"rounds": options.rounds, "models": results})


if __name__ == "__main__":
    main()
