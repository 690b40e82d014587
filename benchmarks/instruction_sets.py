"""Whether a worker takes the fastest of our CPU kernels' instruction sets on this machine.

    python benchmarks/instruction_sets.py [--models llama-135m qwen2-0.5b llama-1.1b] [--kinds bfloat16] [--write]

Every instruction set that this machine has computes the same captured steps of the same model, in turn within a round:
decodes of 1, 8 and 32 sequences, and a prompt of 256 tokens. A model is shortened to as many layers as keep its weights
well past the caches, so that a step reads them from memory. Rates are those of one product or attention, in GB/s where
rows are few and in GFLOP/s where they are many: medians over the rounds, of the best of three repeats in each.
"PyTorch" is its own bfloat16 product of the same shapes by oneDNN, packed beforehand and called from Python.

The verdict weighs products and attention of all layers as a batch of requests does, of 128 prompt and 128 output tokens
each. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kernels import ceilings
from benchmarks.kernels.onednn import PackedProduct
from benchmarks.kernels.phases import CONTEXT, PRODUCTS, Profile, Workload, bytes_and_operations, name_of, num_rows_of
from benchmarks.kit import models, processor, record
from benchmarks.kit.figures import Spread, number, round_figures, spread_of
from blockyard_kernels.cpu.library import Kind, Op, Rows
from blockyard_kernels.cpu.processors import available_instruction_sets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KINDS = ("bfloat16", "float32", "int8")
# A step of fewer rows is bound by what it reads.
MANY_ROWS = 16
# As many weights as are more than caches hold, in int8 too.
COLD_WEIGHTS = 1 << 27
# Of a request of a batch.
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
# Of a step in each round.
REPEATS = 3
TORCH = "PyTorch"
# How much faster another set has to be to say that the wrong one is taken.
MARGIN = 1.05

# Of one op of each name, such as "linear 576x960". The ops of a layer have names of their own; the head is there once.
Seconds = dict[str, float]


class Contestant(Protocol):
    """Computes steps."""

    def run(self, step: str) -> Seconds:
        """Computes a step, and returns the mean seconds of the ops of each name."""
        ...


class OurKernels:
    """A model in the kernels of one instruction set."""

    def __init__(self, profile: Profile, steps: dict[str, Workload]) -> None:
        self.profile = profile
        self._steps = steps
        self._inputs = {
            name: step.inputs(profile.shape.vocab_size, profile.num_kv_groups) for name, step in steps.items()
        }

    def ops(self, step: str) -> list[tuple[Op, float]]:
        """Computes a step, and returns products and attention over all its rows, and the head, with their seconds.

        After the last layer's attention of a prompt there is one row.
        """
        is_decode = self._steps[step].num_new_tokens == 1
        return [
            (op, seconds)
            for op, seconds in self.profile.replay(self._inputs[step])
            if op.kind in PRODUCTS | {Kind.ATTENTION} and (is_decode or op.kind == Kind.HEAD or op.rows == Rows.TOKENS)
        ]

    def run(self, step: str) -> Seconds:
        return mean_by_name((name_of(op), seconds) for op, seconds in self.ops(step))


class OneDnn:
    """The products of the same steps, each with a matrix of its own."""

    def __init__(self, kernels: OurKernels, steps: dict[str, Workload]) -> None:
        self._products = {
            name: [
                (name_of(op), PackedProduct(num_rows_of(op, step), (op.out_features, op.in_features), torch.bfloat16))
                for op, _ in kernels.ops(name)
                if op.kind in PRODUCTS
            ]
            for name, step in steps.items()
        }

    def run(self, step: str) -> Seconds:
        timed: list[tuple[str, float]] = []
        for name, product in self._products[step]:
            begin = time.perf_counter()
            product.run()
            timed.append((name, time.perf_counter() - begin))
        return mean_by_name(timed)


def mean_by_name(timed: Iterable[tuple[str, float]]) -> Seconds:
    """The mean seconds of what has one name."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for name, seconds in timed:
        by_name[name].append(seconds)
    return {name: sum(each) / len(each) for name, each in by_name.items()}


def best_of(repeats: Sequence[Seconds]) -> Seconds:
    """The least seconds of each op: threads sleep at first, and others may disturb one of several repeats."""
    return {name: min(each[name] for each in repeats) for name in repeats[0]}


def measure(
    contestants: dict[str, Contestant], steps: Iterable[str], num_rounds: int
) -> dict[str, dict[str, list[Seconds]]]:
    """Has everyone compute every step once a round, in an order that differs from round to round.

    Returns:
        By step and contestant: the seconds of each round.
    """
    names = list(contestants)
    samples = {step: {name: list[Seconds]() for name in names} for step in steps}
    for turn in range(num_rounds):
        first = turn % len(names)
        for step, by_name in samples.items():
            for name in names[first:] + names[:first]:
                by_name[name].append(best_of([contestants[name].run(step) for _ in range(REPEATS)]))
    return samples


# The results.


@dataclass(frozen=True, slots=True)
class Summary:
    """Sums up the samples of one model in one kind. `chosen`: the instruction set that all are compared with."""

    chosen: str
    num_layers: int
    samples: dict[str, dict[str, list[Seconds]]]

    def sets(self, step: str) -> list[str]:
        """The instruction sets, in their order."""
        return [name for name in self.samples[step] if name != TORCH]

    def ops(self, step: str, needs: dict[str, tuple[float, float]], *, is_few: bool) -> dict[str, Any]:
        """For each op of a step and each set: its rate, and how many times as fast it is as the chosen and as oneDNN.

        `needs`: bytes and operations by op.
        """
        measured = self.samples[step]
        result: dict[str, Any] = {}
        for op, (num_bytes, operations) in needs.items():
            seconds = {name: [each[op] for each in rounds] for name, rounds in measured.items() if op in rounds[0]}
            amount = num_bytes if is_few else operations
            result[op] = {
                name: {
                    "rate": spread_of([amount / each / 1e9 for each in seconds[name]]),
                    **{key: ratio["median"] for key, ratio in self._ratios(name, seconds).items()},
                }
                for name in self.sets(step)
            }
        return result

    def whole(self, step: str, *, with_attention: bool) -> dict[str, Any]:
        """The same of a whole step's products, or of products and attention, which oneDNN does not compute."""
        seconds = self._whole_seconds(step, with_attention=with_attention)
        return {name: self._ratios(name, seconds) for name in self.sets(step)}

    def batch(self, decode: str, prompt: str, num_requests: int, num_prompt_tokens: int) -> dict[str, Spread]:
        """How many times as fast each set is as the chosen one on a batch of requests."""
        steps, prompts = (self._whole_seconds(step, with_attention=True) for step in (decode, prompt))
        num_prompts = num_requests * PROMPT_TOKENS / num_prompt_tokens
        seconds = {
            name: [
                num_prompts * prompt_seconds + (OUTPUT_TOKENS - 1) * step_seconds
                for prompt_seconds, step_seconds in zip(prompts[name], steps[name], strict=True)
            ]
            for name in self.sets(decode)
        }
        return {name: spread_of(seconds[self.chosen], seconds[name]) for name in seconds}

    def _whole_seconds(self, step: str, *, with_attention: bool) -> dict[str, list[float]]:
        def whole(seconds: Seconds) -> float:
            ops = {op: each for op, each in seconds.items() if with_attention or op != "attention"}
            return sum(each * (1 if op.startswith("head") else self.num_layers) for op, each in ops.items())

        able = self.sets(step) if with_attention else list(self.samples[step])
        return {name: [whole(seconds) for seconds in self.samples[step][name]] for name in able}

    def _ratios(self, name: str, seconds: dict[str, list[float]]) -> dict[str, Spread]:
        others = {"over_chosen": self.chosen, "over_torch": TORCH}
        return {key: spread_of(seconds[other], seconds[name]) for key, other in others.items() if other in seconds}


def steps_of(options: argparse.Namespace) -> dict[str, Workload]:
    """The steps by name: decodes, and at last a prompt."""
    steps = {f"decode of {count}": Workload(count, 1, CONTEXT) for count in options.requests}
    length = options.prompt_tokens
    return {**steps, f"prompt of {length}": Workload(1, length, length)}


def run_kind(folder: Path, kind: str, num_layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one kind of weights of one model, whose whole has so many layers."""
    steps = steps_of(options)
    ours = {
        name: OurKernels(Profile(folder, options.num_threads, max(options.requests), kind, name), steps)
        for name in available_instruction_sets()
    }
    first = next(iter(ours.values()))
    contestants: dict[str, Contestant] = {**ours, TORCH: OneDnn(first, steps)}
    summary = Summary(processor.instruction_set(), num_layers, measure(contestants, steps, options.rounds))
    *decodes, prompt = steps
    results: dict[str, Any] = {"steps": {}, "batches": {}}
    for name, step in steps.items():
        is_few = step.num_sequences * step.num_new_tokens < MANY_ROWS
        needs = {name_of(op): bytes_and_operations(op, first.profile.shape, step, kind) for op, _ in first.ops(name)}
        results["steps"][name] = {
            "unit": "GB/s" if is_few else "GFLOP/s",
            "ops": summary.ops(name, needs, is_few=is_few),
            "products": summary.whole(name, with_attention=False),
            "products and attention": summary.whole(name, with_attention=True),
        }
    for count, name in zip(options.requests, decodes, strict=True):
        results["batches"][f"batch of {count}"] = summary.batch(name, prompt, count, options.prompt_tokens)
    return results


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one model in all kinds."""
    recipe = models.RECIPES[name]
    short = shorten(recipe)
    results: dict[str, Any] = {
        "model": name,
        "num_layers_measured": short.num_layers,
        "num_threads": options.num_threads,
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
        "chosen": processor.instruction_set(),
        "kinds": {},
    }
    with tempfile.TemporaryDirectory(prefix="instruction-sets-") as folder:
        model = models.write_model(short, Path(folder) / name)
        for kind in options.kinds:
            print(f"{name}, {kind}", file=sys.stderr, flush=True)
            results["kinds"][kind] = run_kind(model, kind, recipe.num_layers, options)
    return results


def shorten(recipe: models.Recipe) -> models.Recipe:
    """The model with as many layers, at least two, as hold COLD_WEIGHTS, if it has more."""
    shapes = models.weight_shapes(recipe)
    of_a_layer = sum(math.prod(shape) for name, shape in shapes if name.startswith("model.layers.0."))
    return replace(recipe, num_layers=max(2, min(recipe.num_layers, -(-COLD_WEIGHTS // of_a_layer))))


def report(results: dict[str, Any]) -> str:
    """The results as markdown."""
    lines: list[str] = []
    for kind, measured in results["kinds"].items():
        lines += ["", f"# {results['model']}, {kind}", ""]
        lines.append(
            "Medians over the rounds (least–most): rate, × the speed of the chosen set, × that of PyTorch's bfloat16."
        )
        sets = list(next(iter(measured["batches"].values())))
        lines += ["", f"| step | | {' | '.join(sets)} |", "|---" * (2 + len(sets)) + "|"]
        for step, told in measured["steps"].items():
            rows = {f"{op}, {told['unit']}": by_set for op, by_set in told["ops"].items()}
            rows |= {name: told[name] for name in ("products", "products and attention")}
            lines += [
                f"| {step} | {name} | {' | '.join(_cell(by_set[each]) for each in sets)} |"
                for name, by_set in rows.items()
            ]
        for batch, ratios in measured["batches"].items():
            lines.append(f"| {batch} | | {' | '.join(f'×{number(ratios[each], 2)}' for each in sets)} |")
    return "\n".join(lines)


def _cell(told: dict[str, Any]) -> str:
    ratios = [told[name] for name in ("over_chosen", "over_torch") if name in told]
    rate = [f"{told['rate']['median']:.0f}"] if "rate" in told else []
    return " ".join([*rate, *(f"×{each:.2f}" if isinstance(each, float) else f"×{number(each, 2)}" for each in ratios)])


def verdict(all_results: Sequence[dict[str, Any]]) -> str:
    """Says whether another set is faster than the chosen one on some batch: by the margin, and in every round."""
    chosen = all_results[0]["chosen"]
    ratios: dict[str, Spread] = {
        f"{name} on {results['model']} in {kind}, {batch}": spread
        for results in all_results
        for kind, measured in results["kinds"].items()
        for batch, by_set in measured["batches"].items()
        for name, spread in by_set.items()
        if name != chosen
    }
    faster = [what for what, spread in ratios.items() if spread["median"] > MARGIN and spread["min"] > 1]
    if faster:
        lines = (f"  {number(ratios[what], 2)} times as fast: {what}" for what in faster)
        return "\n".join(
            [f"verdict: {chosen} is chosen, and another set is more than {MARGIN - 1:.0%} faster:", *lines]
        )
    nearest = max(ratios, key=lambda what: ratios[what]["median"], default="")
    best = f"; the next: {number(ratios[nearest], 2)} times as fast, {nearest}" if ratios else ""
    return f"verdict: {chosen} is chosen rightly: no other set is more than {MARGIN - 1:.0%} faster on any batch{best}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(models.RECIPES), default=list(models.RECIPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="how weights are held")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32], help="decodes of so many sequences")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the prompt, at most 1024")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-threads", type=int, default=ceilings.usable_processors())
    parser.add_argument(
        "--write", action="store_true", help="keep this run in benchmarks/results/instruction_sets-MODEL.json"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    if not available_instruction_sets():
        raise SystemExit("the CPU kernels lack a build for this processor: python -m blockyard_kernels.cpu.build")
    print(f"{processor.name()}: {' '.join(processor.flags())}")
    all_results: list[dict[str, Any]] = []
    for name in options.models:
        results = round_figures(run(name, options))
        all_results.append(results)
        print(report(results), flush=True)
        if options.write:
            record.append(f"instruction_sets-{name}", results)
    print(f"\n{verdict(all_results)}")


if __name__ == "__main__":
    main()
