"""How exactly and how fast answers are told apart into text, reasoning and calls of tools, by dialect.

Cuts answers of every dialect into random pieces, and counts those that come out otherwise than whole, and characters
that are lost. Then reads a long answer of text, and one of calls, in pieces of four characters, as tokens come.

    python benchmarks/gateway/dialects.py --cuts 100000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kit import record
from gateway.dialects.scanner import Scanner
from gateway.dialects.table import BY_NAME
from tests.unit.gateway.dialects.forms import ANSWERS, FORMS
from tests.unit.gateway.dialects.reading import TOOLS, payload, pieces_of, read, told

PIECE = 4
REPEATS = 5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=100_000, help="places at which answers are cut, in all")
    parser.add_argument("--characters", type=int, default=20_000, help="of a long answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/dialects.json")
    return parser.parse_args(arguments)


def cut(num_cuts: int, seed: int) -> dict[str, int]:
    """Cuts random answers, one or two behind another and cut off somewhere, into random pieces."""
    draw, names = random.Random(seed), sorted(ANSWERS)
    counts = {"cuts": 0, "answers": 0, "differing": 0, "losing": 0}
    while counts["cuts"] < num_cuts:
        answer = ANSWERS[draw.choice(names)]
        others = [other.raw for other in ANSWERS.values() if other.dialect == answer.dialect]
        raw = answer.raw + draw.choice(others) * draw.randrange(2)
        raw = raw[: draw.randint(1, len(raw))]
        cuts = [draw.randint(0, len(raw)) for _ in range(draw.randint(1, 12))]
        whole = read(answer.dialect, [raw])
        counts["cuts"] += len(cuts)
        counts["answers"] += 1
        counts["differing"] += read(answer.dialect, pieces_of(raw, cuts)) != whole
        counts["losing"] += payload(told(whole)) != payload(raw)
    return counts


def microseconds_a_character(dialect: str, answer: str) -> float:
    """The best of some runs over an answer that comes in small pieces."""
    pieces = [answer[start : start + PIECE] for start in range(0, len(answer), PIECE)]
    best = float("inf")
    for _ in range(REPEATS):
        scanner = Scanner(BY_NAME[dialect], TOOLS)
        began = time.perf_counter()
        for piece in pieces:
            scanner.push(piece)
        scanner.push("", is_last=True)
        best = min(best, time.perf_counter() - began)
    return round(best / len(answer) * 1e6, 3)


def main(options: argparse.Namespace) -> dict[str, Any]:
    speeds: dict[str, dict[str, float]] = {}
    text = "It was a bright <b>cold</b> day in April, and the clocks were striking thirteen.\n"
    for name, form in FORMS.items():
        arguments = {"text": text * (options.characters // len(text)), "obj": {"a": [1, 2.5] * 20}}
        speeds[name] = {
            "text": microseconds_a_character(form.dialect, form.before + text * (options.characters // len(text))),
            "one call": microseconds_a_character(form.dialect, form.calls([("f", arguments)])),
            "short calls": microseconds_a_character(form.dialect, form.calls([("f", {"text": "a b", "num": 1})] * 200)),
        }
    worst = max(speed for each in speeds.values() for speed in each.values())
    return {**cut(options.cuts, options.seed), "microseconds_a_character": speeds, "worst": worst}


if __name__ == "__main__":
    options = parse()
    results = main(options)
    print(results)
    if options.write:
        record.append("dialects", results)
