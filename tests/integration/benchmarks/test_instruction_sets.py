"""Which instruction set is the fastest: measured over a tiny model, and judged over numbers that are known."""

from collections import Counter

import pytest

from benchmarks import instruction_sets
from benchmarks.instruction_sets import TORCH, OurKernels, Summary
from benchmarks.kernels.phases import CONTEXT, Profile, Workload, name_of
from benchmarks.kit import models, processor
from benchmarks.kit.figures import spread_of
from blockyard_kernels.cpu.processors import available_instruction_sets

RECIPE = models.Recipe(32, 3, 4, 2, 48, 320, tied=True, qkv_bias=False)
OPS = {"linear 32x64", "attention", "linear 32x32", "linear_gated 32x96", "linear 48x32", "head 32x320"}


@pytest.mark.timeout(120)
def test_every_set_computes_every_op_in_every_kind(monkeypatch):
    monkeypatch.setitem(models.RECIPES, "tiny", RECIPE)
    sizes = ["--requests", "1", "3", "--prompt-tokens", "16", "--rounds", "1", "--num-threads", "1"]
    results = instruction_sets.run("tiny", instruction_sets.parse(["--models", "tiny", *sizes]))
    assert list(results["kinds"]) == ["bfloat16", "float32", "int8"]
    for measured in results["kinds"].values():
        assert list(measured["batches"]) == ["batch of 1", "batch of 3"]
        assert list(measured["steps"]) == ["decode of 1", "decode of 3", "prompt of 16"]
        for step in measured["steps"].values():
            assert set(step["ops"]) == OPS
            for by_set in (*step["ops"].values(), step["products"]):
                assert tuple(by_set) == available_instruction_sets()
                assert all(told.get("over_torch", 1) for told in by_set.values())
    text = instruction_sets.report(results)
    assert "| prompt of 16 | head 32x320, GFLOP/s |" in text
    assert instruction_sets.verdict([results]).startswith(f"verdict: {processor.instruction_set()} is chosen")


def test_only_ops_over_all_rows_are_compared(tmp_path):
    """After the last attention of a prompt one row is left, whose logits are wanted."""
    profile = Profile(models.write_model(RECIPE, tmp_path / "tiny"), num_threads=1, max_sequences=2)
    kernels = OurKernels(profile, {"decode": Workload(2, 1, CONTEXT), "prompt": Workload(1, 16, 16)})
    decode, prompt = (Counter(name_of(op) for op, _ in kernels.ops(step)) for step in ("decode", "prompt"))
    assert decode == dict.fromkeys(OPS, 3) | {"head 32x320": 1}
    assert prompt == dict.fromkeys(OPS, 2) | {"linear 32x64": 3, "attention": 3, "head 32x320": 1}


class Counting:
    """Takes as many seconds as runs are left."""

    def __init__(self, name: str, runs: list[str]) -> None:
        self._name, self._runs = name, runs

    def run(self, step: str) -> dict[str, float]:
        self._runs.append(self._name)
        return {step: 100.0 - len(self._runs)}


def test_everyone_has_a_turn_in_every_round_in_another_order():
    runs: list[str] = []
    samples = instruction_sets.measure({name: Counting(name, runs) for name in "ab"}, ["decode"], 2)
    assert "".join(runs) == "aaabbbbbbaaa"
    # Of three repeats the least.
    assert samples == {"decode": {"a": [{"decode": 97.0}, {"decode": 88.0}], "b": [{"decode": 94.0}, {"decode": 91.0}]}}


SAMPLES = {
    "decode": {
        "a": [{"linear": 1.0, "attention": 2.0, "head": 3.0}, {"linear": 1.0, "attention": 1.0, "head": 1.0}],
        "b": [{"linear": 2.0, "attention": 2.0, "head": 6.0}, {"linear": 0.5, "attention": 1.0, "head": 0.5}],
        TORCH: [{"linear": 4.0, "head": 3.0}, {"linear": 4.0, "head": 1.0}],
    },
    "prompt": {
        "a": [{"linear": 10.0, "attention": 0.0, "head": 0.0}] * 2,
        "b": [{"linear": 10.0, "attention": 0.0, "head": 0.0}] * 2,
        TORCH: [{"linear": 1.0, "head": 1.0}] * 2,
    },
}


def test_rates_and_ratios_of_an_op():
    told = Summary("a", 5, SAMPLES).ops("decode", {"linear": (8e9, 2e9), "attention": (4e9, 1e9)}, is_few=True)
    assert told["linear"]["b"] == {"rate": spread_of([4.0, 16.0]), "over_chosen": 1.25, "over_torch": 5.0}
    assert told["attention"]["a"] == {"rate": spread_of([2.0, 4.0]), "over_chosen": 1.0}
    told = Summary("a", 5, SAMPLES).ops("decode", {"linear": (8e9, 2e9)}, is_few=False)
    assert told["linear"]["a"]["rate"]["median"] == 2.0


def test_a_whole_step_has_all_layers_and_one_head():
    whole = Summary("a", 5, SAMPLES).whole("decode", with_attention=False)
    assert whole["b"]["over_chosen"] == spread_of([8 / 16, 6 / 3])
    assert whole["a"]["over_torch"] == spread_of([23 / 8, 21 / 6])
    whole = Summary("a", 5, SAMPLES).whole("decode", with_attention=True)
    assert whole["b"] == {"over_chosen": spread_of([18 / 26, 11 / 8])}


def test_a_batch_is_its_prompts_and_a_step_for_each_further_token():
    """Two requests of 128 tokens are one prompt of 256."""
    ratios = Summary("a", 5, SAMPLES).batch("decode", "prompt", 2, 256)
    assert ratios["b"] == spread_of([(50 + 127 * 18) / (50 + 127 * 26), (50 + 127 * 11) / (50 + 127 * 8)])


def results_of(model: str, **ratios: list[float]) -> dict:
    batches = {"batch of 8": {name: spread_of(each) for name, each in {"a": [1.0], **ratios}.items()}}
    return {"model": model, "chosen": "a", "kinds": {"int8": {"batches": batches}}}


def test_the_verdict_allows_a_margin():
    text = instruction_sets.verdict([results_of("m", b=[1.04], c=[0.5])])
    assert text.startswith(
        "verdict: a is chosen rightly: no other set is more than 5% faster on any batch; the next: 1.04"
    )
    assert text.endswith("times as fast, b on m in int8, batch of 8")
    assert instruction_sets.verdict([results_of("m")]).endswith("faster on any batch")


def test_the_verdict_names_all_that_are_faster():
    text = instruction_sets.verdict([results_of("m", b=[1.2]), results_of("n", b=[1.0], c=[2.0, 3.0])])
    assert text.splitlines()[1:] == [
        "  1.20 (1.20–1.20) times as fast: b on m in int8, batch of 8",
        "  2.50 (2.00–3.00) times as fast: c on n in int8, batch of 8",
    ]


def test_a_set_that_was_slower_once_is_not_faster():
    assert "chosen rightly" in instruction_sets.verdict([results_of("m", b=[0.9, 1.2, 1.3])])


def test_a_model_keeps_as_many_layers_as_caches_do_not_hold():
    kept = {name: instruction_sets.shorten(recipe).num_layers for name, recipe in models.RECIPES.items()}
    assert kept == {"llama-135m": 30, "qwen2-0.5b": 10, "llama-1.1b": 4}
    assert instruction_sets.shorten(RECIPE) == RECIPE
