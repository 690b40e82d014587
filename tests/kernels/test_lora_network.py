"""Networks with adapters: as near to the truth as PEFT's own way, and the same bits however rows are mixed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from blockyard.lora.virtual_tokens import virtual_ids
from blockyard_kernels.cpu.library import Kind
from blockyard_kernels.cpu.plan import CapturedPlan
from tests.kernels.test_truth import random_ids
from tests.kit.kernels.backends import BEST, EMULATED, REFERENCE, Kernels
from tests.kit.kernels.ranks import Ranks, new_backend
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_adapters import apply_adapter, make_tiny_adapter, make_tiny_prompt, read_prompt
from tests.kit.kernels.tiny_models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

NAME = "llama_bias"
LENGTH, PIECES = 70, [33, 1, 1, 20, 15]
MAX_VIRTUAL = 6


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of every module, one of few, one of another rank and scale, and two soft prompts."""
    home, model = tmp_path_factory.mktemp("adapters"), tiny_model(NAME)
    return [
        make_tiny_adapter(home / "all", model, 1),
        make_tiny_adapter(home / "few", model, 2, rank=8, targets=("v_proj", "up_proj", "o_proj")),
        make_tiny_adapter(home / "odd", model, 3, rank=3, use_rslora=True, lora_alpha=5),
        make_tiny_prompt(home / "soft", model, 4, num_tokens=MAX_VIRTUAL),
        make_tiny_prompt(home / "short", model, 5, num_tokens=2),
    ]


def with_prompt(folder: Path | None, token_ids: list[int]) -> list[int]:
    """Ids behind those of an adapter's soft prompt, if it is one."""
    return [*virtual_ids(len(read_prompt(folder)) if folder else 0), *token_ids]


@cache
@torch.no_grad()
def truth(folder: Path | None, dtype: torch.dtype) -> torch.Tensor:
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(NAME), dtype=dtype).eval()
    embeddings = network.get_input_embeddings()(torch.tensor(random_ids(LENGTH, 0)))
    if folder is not None and len(prompt := read_prompt(folder)):
        embeddings = torch.cat([prompt.to(dtype), embeddings])
    elif folder is not None:
        apply_adapter(network, folder)
    return network(inputs_embeds=embeddings[None]).logits[0].float()


def load(kernels: Kernels, adapters: list[Path]) -> StepRunner:
    runner = StepRunner.load(tiny_model(NAME), kernels.dtype, new_backend(kernels))
    return runner.make_slots(adapters, max_virtual_tokens=MAX_VIRTUAL)


# Its probe takes long: one dtype of torch's stands for all.
FIRST = Kernels(REFERENCE, torch.float32)
OURS = [
    *(Kernels(BEST, dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(Kernels(name, torch.bfloat16) for name in EMULATED),
]
MIXED = [FIRST, *OURS]
SHARED = [(FIRST, 2), *((each, size) for each in OURS for size in (2, 4))]
ALONE = [Kernels(name, dtype) for name in (REFERENCE, BEST) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("kernels", ALONE, ids=str)
def test_adapters_compute_what_pefts_way_does(kernels: Kernels, adapters: list[Path]):
    runner = load(kernels, adapters)
    for lora_id, folder in enumerate(adapters, 1):
        runner.adapt(lora_id, lora_id)
        token_ids, expected = with_prompt(folder, random_ids(LENGTH, 0)), truth(folder, torch.float32)
        extra = len(token_ids) - LENGTH
        ours = runner.run(lora_id, token_ids, [extra, *PIECES] if extra else PIECES)
        assert (expected[-LENGTH:] - truth(None, torch.float32)).abs().mean() > 0.1
        if kernels.dtype is torch.float32:
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
        else:
            theirs = (truth(folder, kernels.dtype) - expected).abs().mean()
            assert (ours - expected).abs().mean() <= 1.5 * theirs


@pytest.mark.parametrize("kernels", MIXED, ids=str)
def test_mixed_rows_are_the_bits_of_each_alone(kernels: Kernels, adapters: list[Path]):
    plain = StepRunner.load(tiny_model(NAME), kernels.dtype, new_backend(kernels)).probe()
    runner = load(kernels, adapters).probe()
    assert plain.is_exact
    assert runner.is_exact
    lora_of = {key: key % 6 for key in range(8)}
    folders = [None, *adapters]
    prompts = {key: with_prompt(folders[lora_of[key]], random_ids(20 + key, 10 + key)) for key in lora_of}
    expected: dict[int, torch.Tensor] = {}
    for key, token_ids in prompts.items():
        runner.adapt(("alone", key), lora_of[key])
        at_once = (plain if not lora_of[key] else runner).run(("alone", key), token_ids, [len(token_ids)])
        expected[key] = at_once
    for captured in (False, True):
        if captured and kernels.is_reference:
            break
        if captured:
            runner.capture(256)
        for key in prompts:
            runner.adapt((captured, key), lora_of[key])
        begins = dict.fromkeys(prompts, 0)
        for turn in range(32):
            some = {key: prompts[key][begins[key] : begins[key] + (5 if key == turn else 1)] for key in prompts}
            work = [((captured, key), ids) for key, ids in some.items() if ids]
            for ((_, key), ids), logits in zip(work, runner.step(work), strict=True):
                assert torch.equal(logits, expected[key][begins[key] : begins[key] + len(ids)])
                begins[key] += len(ids)
    assert runner.num_replayed == (0 if kernels.is_reference else 32)


def test_a_step_without_adapters_has_no_op_of_them(adapters: list[Path]):
    """The very ops of a network without slots, also where a row has a soft prompt; one with LoRA brings the others."""
    best = Kernels(BEST, torch.bfloat16)
    plain = StepRunner.load(tiny_model(NAME), best.dtype, new_backend(best))
    runner = load(best, adapters)
    runner.adapt("adapted", 1)
    runner.adapt("soft", 4)
    kinds: dict[str, list[int]] = {}
    for name, each in (("plain", plain), ("base", runner), ("adapted", runner), ("soft", runner)):
        each.capture(64)
        token_ids = with_prompt(adapters[3] if name == "soft" else None, random_ids(9, 0))
        each.step([(name, token_ids), ("other", random_ids(5, 1))])
        assert isinstance(each._captured, CapturedPlan)
        kinds[name] = [op.kind for op, _ in each._captured.phase_seconds()]
    assert kinds["base"] == kinds["soft"] == kinds["plain"]
    added = [kind for kind in kinds["adapted"] if kind in (Kind.LORA_SHRINK, Kind.LORA_EXPAND)]
    assert len(kinds["adapted"]) == len(kinds["base"]) + len(added)
    assert added


@pytest.mark.parametrize(
    ("kernels", "size"), [(FIRST, 2), *((each, size) for each in OURS for size in (2, 4))], ids=str
)
def test_ranks_compute_the_bits_of_one(kernels: Kernels, size: int, adapters: list[Path]):
    name = "qwen3"
    home = adapters[0].parent / name
    folders = [make_tiny_adapter(home / str(rank), tiny_model(name), rank, rank=rank) for rank in (4, 7)]
    folders.append(make_tiny_prompt(home / "soft", tiny_model(name), 9))
    alone = StepRunner.load(tiny_model(name), kernels.dtype, new_backend(kernels))
    ranks = Ranks(tiny_model(name), kernels, size)
    for runner in (alone, *ranks.runners):
        runner.make_slots(folders, max_virtual_tokens=MAX_VIRTUAL)
        runner.adapt("first", 1)
        runner.adapt("second", 2)
        runner.adapt("soft", 3)
    work = [[(key, random_ids(33, seed)) for seed, key in enumerate(("first", "none", "second"))]]
    work[0].append(("soft", with_prompt(folders[2], random_ids(20, 7))))
    work += [[(key, random_ids(1, seed)) for seed, key in enumerate(("second", "none", "first"))]]
    expected = [torch.cat(alone.step(step)) for step in work]
    for captured in (False, True):
        if captured:
            if kernels.is_reference:
                break
            for runner in ranks.runners:
                runner.drop_all()
                runner.capture(128, max_length=256)
        for step, logits in zip(work, expected, strict=True):
            parts = ranks.together(lambda runner, step=step: torch.cat(runner.step(step)))
            assert torch.equal(torch.cat(parts, dim=1), logits)
