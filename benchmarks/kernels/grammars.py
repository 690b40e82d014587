"""What grammars cost a worker: a step of constrained rows against one of free rows, the first token, and memory.

    python benchmarks/kernels/grammars.py [--model qwen2-0.5b] [--write]

Decodes both kinds of rows in turn, step by step in one process, with sampling alike, so that whatever else the machine
does meets both. Prints milliseconds of a step, the median, and their ratio, for 8 and 64 rows; how much later the first
token of a request comes whose grammar nobody has asked for before; and what the vocabulary takes. The targets are 1.03,
1.10, 15 ms and 150 MB at the shape of 0.5 B with 152,000 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kit import record
from benchmarks.kit.models import RECIPES, make_model
from blockyard.contract.sampling import SamplingParams
from blockyard.contract.workers import CachePlan
from worker_service.grammars.matchers import make_grammars
from worker_service.models.loader import load_model
from worker_service.set_up import DeviceChoice, SetUp, make_executor
from worker_service.step import NewRow, Step

COUNTS = (8, 64)
BLOCK_SIZE, PROMPT_LENGTH, MAX_LEN = 32, 128, 512
NUM_WARM_UP, NUM_STEPS, NUM_FIRST = 10, 120, 24
NUM_BLOCKS_EACH = -(-MAX_LEN // BLOCK_SIZE)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,12}\\.(com|org)$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "email", "age", "tags", "note"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}


class Rows:
    """Sequences of one kind, some of which a step decodes."""

    def __init__(self, first_id: int, grammar: str) -> None:
        self._first_id = first_id
        self._grammar = grammar

    def begin(self, number: int, grammar: str = "") -> NewRow:
        """A prompt."""
        sequence_id = self._first_id + number
        blocks = 1 + sequence_id * NUM_BLOCKS_EACH + np.arange(NUM_BLOCKS_EACH)
        sampling = SamplingParams(seed=number, grammar=grammar or self._grammar)
        token_ids = 10 + (np.arange(PROMPT_LENGTH) * (number + 3)) % 1000
        return NewRow(sequence_id, 0, token_ids, PROMPT_LENGTH, 0, blocks, sampling, 0, (1,))

    def ids(self, count: int) -> tuple[int, ...]:
        """Of the first ones."""
        return tuple(range(self._first_id, self._first_id + count))


class Run:
    """One epoch of an executor."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._step_id = 0
        executor.begin_epoch(1)

    def seconds(self, **fields: Any) -> float:
        """Executes a step and returns how long it took, from when its message is decoded."""
        self._step_id += 1
        step = Step(1, self._step_id, **fields)
        started = time.perf_counter()
        self._executor.prepare(step)
        result = self._executor.execute(step, started)
        seconds = time.perf_counter() - started
        assert result.refusal is None, result.refusal
        assert not result.failures, result.failures
        return seconds

    def decode(self, ids: tuple[int, ...]) -> float:
        """Decodes a token of each."""
        return self.seconds(sequence_ids=ids, num_new_tokens=np.ones(len(ids), np.int64))

    def start(self, new: NewRow) -> float:
        """Computes a prompt, and samples its first token."""
        count = np.array([PROMPT_LENGTH])
        return self.seconds(new_sequences=(new,), sequence_ids=(new.sequence_id,), num_new_tokens=count)


def grammar_of(schema: dict[str, Any], number: int = 0) -> str:
    """The text that a gateway makes of a schema."""
    return f"start: %json {json.dumps({**schema, 'description': str(number)})}"


def measure(name: str, num_threads: int) -> dict[str, Any]:
    """Returns what there is to print."""
    torch.set_num_threads(num_threads)
    cpu = torch.device("cpu")
    loaded = load_model(make_model(name), torch.bfloat16, cpu, lambda done, total: None)
    gc.collect()
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    grammars = make_grammars(loaded)
    made_seconds, made_bytes = time.perf_counter() - started, psutil.Process().memory_info().rss - before
    set_up = SetUp("", DeviceChoice(cpu, None, 0), loaded, grammars=grammars)
    num_blocks = 1 + (2 * COUNTS[-1] + 2) * NUM_BLOCKS_EACH
    request = CachePlan(BLOCK_SIZE, num_blocks, 0, MAX_LEN, 2048, COUNTS[-1])
    executor, _ = make_executor(set_up, request, may_choose_threads=False)
    run, free, held = Run(executor), Rows(0, ""), Rows(COUNTS[-1], grammar_of(ENDLESS))
    for number in range(COUNTS[-1]):
        run.start(free.begin(number))
        run.start(held.begin(number))
    results: dict[str, Any] = {"model": name, "vocabulary_seconds": round(made_seconds, 3)}
    results["vocabulary_mb"] = round(made_bytes / 1e6, 1)
    for count in COUNTS:
        pairs = [(run.decode(free.ids(count)), run.decode(held.ids(count))) for _ in range(NUM_WARM_UP + NUM_STEPS)]
        plain, constrained = (statistics.median(column) for column in zip(*pairs[NUM_WARM_UP:], strict=True))
        results[f"rows_{count}"] = {
            "free_ms": round(plain * 1e3, 3),
            "constrained_ms": round(constrained * 1e3, 3),
            "ratio": round(constrained / plain, 3),
        }
    results["first_token"] = first_token(run)
    return results


def first_token(run: Run) -> dict[str, float]:
    """Compares first tokens, of prompts that come one after another."""
    last = Rows(2 * COUNTS[-1], "")
    seconds: dict[str, list[float]] = {"free": [], "constrained": []}
    for number in range(NUM_FIRST):
        for kind, grammar in (("free", ""), ("constrained", grammar_of(PERSON, 1 + number))):
            new = last.begin(0, grammar)
            seconds[kind].append(run.start(new))
            run.seconds(finished_sequence_ids=(new.sequence_id,), num_new_tokens=np.zeros(0, np.int64))
    plain, constrained = (statistics.median(each) for each in seconds.values())
    return {"free_ms": round(plain * 1e3, 2), "later_ms": round((constrained - plain) * 1e3, 2)}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=RECIPES, default="qwen2-0.5b")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results")
    options = parser.parse_args()
    results = {"num_threads": options.num_threads, **measure(options.model, options.num_threads)}
    print(json.dumps(results, indent=2))
    if options.write:
        record.append("grammars", results)


if __name__ == "__main__":
    main()
