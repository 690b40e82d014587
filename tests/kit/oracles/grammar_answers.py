"""Asks a served model for JSON by every schema of `schemas`, and holds each answer against it.

    python -m tests.kit.oracles.grammar_answers [--answers 10000] [--write]

starts the services with a tiny random model for that, and prints what came.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from benchmarks.kit import record
from blockyard import AsyncClient, FinishReason, StructuredOutputsParams
from tests.kit.oracles.schemas import SCHEMAS
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from blockyard import Choice

# Requests at a time, and answers of one.
NUM_AT_ONCE, MAX_N = 16, 8
NUM_BIASED, BIAS = 48, 6.0
# Without "time", which jsonschema reads as an hour, a minute and a second alone.
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("date", ValueError)
def is_date(value: object) -> bool:
    """Knows the year 0, which Python's dates have not, and RFC 3339 has."""
    text = str(value)
    return bool(datetime.date.fromisoformat(f"2000{text[4:]}" if text.startswith("0000") else text))


@dataclass
class Tally:
    """What came of all answers."""

    reasons: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    wrong: list[str] = field(default_factory=list[str])
    """A sentence for each answer that its schema does not allow."""
    num_tokens: int = 0

    @property
    def num_answers(self) -> int:
        """How many came."""
        return sum(self.reasons.values())

    @property
    def share_ended(self) -> float:
        """The share of answers that ended by themselves."""
        return self.reasons[FinishReason.STOP] / max(1, self.num_answers)

    def add(self, choice: Choice, schema: dict[str, Any]) -> None:
        """Takes an answer."""
        assert choice.finish_reason is not None
        self.reasons[choice.finish_reason] += 1
        self.num_tokens += choice.usage.num_completion_tokens
        if choice.finish_reason is FinishReason.LENGTH:
            return
        problem = _problem(choice, schema)
        if problem:
            self.wrong.append(f"{json.dumps(schema)}: {choice.text!r}: {problem}")


def _problem(choice: Choice, schema: dict[str, Any]) -> str:
    if choice.finish_reason is not FinishReason.STOP:
        return str(choice.error or choice.finish_reason)
    try:
        value = json.loads(choice.text)
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


async def ask(target: str, num_answers: int, seed: int = 1, max_tokens: int = 160, vocab_size: int = 300) -> Tally:
    """Asks for so many answers, at temperature 2 and with random biases, the schemas in turn."""
    tally, places = Tally(), asyncio.Semaphore(NUM_AT_ONCE)
    rounds = -(-num_answers // len(SCHEMAS))
    async with AsyncClient(target) as client:

        async def ask_one(number: int, first: int, n: int) -> None:
            draw, schema = random.Random(f"{seed}/{number}/{first}"), SCHEMAS[number]
            form = StructuredOutputsParams(json=schema, disable_any_whitespace=draw.random() < 0.3)
            bias = {draw.randrange(vocab_size): draw.uniform(-BIAS, BIAS) for _ in range(NUM_BIASED)}
            async with places:
                completion = await client.generate(
                    "Once",
                    structured_outputs=form,
                    logit_bias=bias,
                    temperature=2,
                    seed=draw.getrandbits(32),
                    n=n,
                    max_tokens=max_tokens,
                )
            for choice in completion.choices:
                tally.add(choice, schema)

        await asyncio.gather(
            *(
                ask_one(number, first, min(MAX_N, rounds - first))
                for number in range(len(SCHEMAS))
                for first in range(0, rounds, MAX_N)
            )
        )
    return tally


def main() -> None:
    """Runs it with a model that knows nothing."""
    from tests.kit.kernels.tiny_models import tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results")
    arguments = parser.parse_args()
    flags = ["--dtype", "float32", "--num-device-blocks", "2000", "--max-num-seqs", "64"]
    with System(tiny_model("qwen3"), Path(tempfile.mkdtemp()), flags) as system:
        tally = asyncio.run(ask(system.grpc_target, arguments.answers, arguments.seed))
    lines = [f"{tally.num_answers} answers of {len(SCHEMAS)} schemas, {tally.num_tokens} tokens: {dict(tally.reasons)}"]
    lines.append(f"{tally.share_ended:.1%} ended by themselves; {len(tally.wrong)} wrong")
    sys.stdout.write("\n".join([*lines, *tally.wrong[:40]]) + "\n")
    if arguments.write:
        told = {"answers": tally.num_answers, "schemas": len(SCHEMAS), "tokens": tally.num_tokens}
        record.append("grammar_answers", {**told, "wrong": len(tally.wrong), "ended": round(tally.share_ended, 4)})
    if tally.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
