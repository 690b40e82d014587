"""A captured step gives the bits of its ops one by one: any rows chosen, in any order, on any number of threads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard_kernels.capture import CapturedStep, CaptureSizes, StepInputs
from blockyard_kernels.ops import kv_pool_shape
from tests.kit.kernels.backends import COMPILED, REFERENCE, Kernels, in_dtype
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from worker_service.models.decoder import DecoderModel

BLOCK_SIZE = 16
NUM_BLOCKS = 40
SIZES = CaptureSizes(max_num_tokens=96, max_num_seqs=8, block_size=BLOCK_SIZE)
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)
in_bfloat16 = pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.bfloat16), ids=str)


def load(kernels: Kernels, name: str = "llama") -> DecoderModel:
    folder = tiny_model(name)
    files = WeightFiles(folder, lambda done_bytes, total_bytes: None)
    model = build_decoder(read_config(folder, kernels.dtype), kernels.backend, files)
    model.reserve_positions(512)
    return model


@dataclass
class Bench:
    """A model over two pools of the same content: one for its captured form, one for its ops one by one."""

    kernels: Kernels
    model: DecoderModel
    pools: tuple[torch.Tensor, torch.Tensor]
    captured: CapturedStep

    @classmethod
    def make(cls, kernels: Kernels, name: str = "llama", sizes: CaptureSizes = SIZES) -> Bench:
        model = load(kernels, name)
        config = model.config
        shape = kv_pool_shape(NUM_BLOCKS, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        first, second = (torch.full(shape, float("nan"), dtype=kernels.dtype) for _ in range(2))
        captured = model.capture(first, sizes)
        assert captured is not None
        return cls(kernels, model, (first, second), captured)

    def replay(self, step: StepInputs) -> torch.Tensor:
        """The logits of the chosen rows, which must be what is told without them."""
        outputs = self.captured.replay(step, with_logits=True)
        assert outputs.logits is not None
        told = self.captured.replay(step, with_logits=False)
        assert told.logits is None
        assert told.best.tolist() == outputs.best.tolist() == outputs.logits.argmax(1).tolist()
        assert told.finite.tolist() == outputs.finite.tolist() == outputs.logits.isfinite().all(1).tolist()
        return outputs.logits

    def compute(self, step: StepInputs) -> torch.Tensor:
        """The same, op by op, in the other pool."""
        config = self.model.config
        batch = self.kernels.backend.plan_attention(
            step.num_new_tokens, step.seq_lens, step.block_tables, BLOCK_SIZE, config.sliding_window
        )
        hidden = self.model.forward(torch.from_numpy(step.token_ids), batch, self.pools[1])
        return self.model.compute_logits(hidden[torch.from_numpy(step.chosen)])

    def assert_same(self, step: StepInputs) -> torch.Tensor:
        logits = self.replay(step)
        assert torch.equal(logits, self.compute(step))
        torch.testing.assert_close(self.pools[0], self.pools[1], rtol=0, atol=0, equal_nan=True)
        return logits


def make_step(new: list[int], lens: list[int], chosen: list[int], seed: int = 0) -> StepInputs:
    """Sequence i has the blocks 5 i, 5 i + 1, …"""
    generator = np.random.default_rng(seed)
    tables = np.arange(5 * len(new), dtype=np.int32).reshape(len(new), 5)
    token_ids = generator.integers(0, VOCAB_SIZE, sum(new))
    return StepInputs(np.array(new, np.int64), np.array(lens, np.int64), tables, token_ids, np.array(chosen, np.int64))


@for_compiled
@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_bias", "llama_yarn", "mistral", "qwen2", "qwen3"])
def test_a_replay_gives_the_bits_of_the_ops_one_by_one(name: str, kernels: Kernels):
    bench = Bench.make(kernels, name)
    bench.assert_same(make_step([40, 17, 1], [40, 17, 1], [39, 56, 57]))
    for index in range(1, 4):
        bench.assert_same(make_step([1, 1, 1], [40 + index, 17 + index, 1 + index], [0, 1, 2], index))
    bench.assert_same(make_step([1, 30, 0, 5], [44, 50, 4, 5], [0, 35], 9))


@for_compiled
def test_rows_are_chosen_in_any_order_and_more_than_once(kernels: Kernels):
    bench = Bench.make(kernels)
    new = [30, 1, 0, 9]
    everything = bench.assert_same(make_step(new, new, list(range(40))))
    for chosen in ([39], [3, 3, 3], [39, 0, 17, 0, 30], list(reversed(range(40))), [5] * 96):
        assert torch.equal(bench.replay(make_step(new, new, chosen)), everything[chosen])


@for_compiled
def test_no_row_needs_be_chosen(kernels: Kernels):
    """A piece of a prefill: its keys and values are written all the same."""
    bench = Bench.make(kernels)
    assert bench.assert_same(make_step([30], [30], [])).shape == (0, VOCAB_SIZE)
    bench.assert_same(make_step([5], [35], [4], 1))


@for_compiled
def test_a_step_of_nothing_is_none(kernels: Kernels):
    bench = Bench.make(kernels)
    before = bench.pools[0].clone()
    assert bench.replay(make_step([], [], [])).shape == (0, VOCAB_SIZE)
    assert bench.replay(make_step([0, 0], [3, 16], [])).shape == (0, VOCAB_SIZE)
    torch.testing.assert_close(bench.pools[0], before, rtol=0, atol=0, equal_nan=True)


@for_compiled
def test_threads_may_change_after_the_capture(kernels: Kernels):
    bench = Bench.make(kernels)
    expected = bench.assert_same(make_step([40, 3], [40, 3], [39, 42]))
    for num_threads in (3, 2, 7, 1):
        kernels.backend.set_num_threads(num_threads)
        assert torch.equal(bench.replay(make_step([40, 3], [40, 3], [39, 42])), expected)


@in_bfloat16
def test_steps_of_every_size_in_any_order_share_one_arena(kernels: Kernels):
    """What a larger step left in the arena is rubbish to the next."""
    bench, chooser = Bench.make(kernels, "qwen3"), random.Random(4)
    for index in range(40):
        new = [1, *(chooser.choice([0, 1, 1, 2, 7, 23]) for _ in range(chooser.randint(0, 7)))]
        while sum(new) > SIZES.max_num_tokens:
            new.pop()
        chosen = [chooser.randrange(sum(new)) for _ in range(chooser.randint(0, 9))]
        bench.assert_same(make_step(new, new, chosen, index))


@in_bfloat16
def test_two_captures_of_one_backend_are_none_of_each_others_business(kernels: Kernels):
    first, second = Bench.make(kernels), Bench.make(kernels, "mistral")
    step = make_step([40, 3], [40, 3], [39, 42])
    expected = first.replay(step), second.replay(step)
    for _ in range(3):
        assert torch.equal(first.replay(step), expected[0])
        assert torch.equal(second.replay(step), expected[1])


@for_compiled
def test_a_row_that_went_wrong_is_told_and_harms_no_other(kernels: Kernels):
    bench = Bench.make(kernels)
    bench.replay(make_step([20, 20], [20, 20], [19, 39]))
    decode = make_step([1, 1], [21, 21], [0, 1], 1)
    good = bench.replay(decode)
    # The first block of the second sequence.
    bench.pools[0][5] = float("nan")
    outputs = bench.captured.replay(decode, with_logits=True)
    assert outputs.finite.tolist() == [True, False]
    assert outputs.logits is not None
    assert torch.equal(outputs.logits[0], good[0])
    assert outputs.best[0] == good[0].argmax()


@for_compiled
@pytest.mark.parametrize("best", [[0], [70, 199], [31, 32], [15, 16, 383]])
def test_of_equal_logits_the_lowest_id_wins_on_any_threads(best: list[int], kernels: Kernels):
    """Heads whose best columns are the same, and lie in one vector, in two, or panels apart."""
    bench = Bench.make(kernels)
    step = make_step([9], [9], list(range(9)))
    head = torch.zeros(VOCAB_SIZE, bench.model.config.hidden_size, dtype=kernels.dtype)
    head[best] = torch.randn(bench.model.config.hidden_size).to(kernels.dtype)
    bench.model._ending = replace(bench.model._ending, head=kernels.backend.pack_linear(head))
    captured = bench.model.capture(bench.pools[0], SIZES)
    assert captured is not None
    for num_threads in (3, 1):
        kernels.backend.set_num_threads(num_threads)
        outputs = captured.replay(step, with_logits=True)
        assert outputs.logits is not None
        # Where the columns give less than nothing, the lowest of all others wins.
        other = min(set(range(VOCAB_SIZE)) - set(best))
        assert outputs.best.tolist() == [best[0] if row[best[0]] > 0 else other for row in outputs.logits]
        assert outputs.best.tolist() == captured.replay(step, with_logits=False).best.tolist()


@for_compiled
def test_larger_steps_are_not_taken(kernels: Kernels):
    captured = Bench.make(kernels).captured
    assert captured.takes(make_step([96], [96], [0] * 96))
    assert not captured.takes(make_step([97], [97], [0]))
    assert not captured.takes(make_step([1], [1], [0] * 97))
    few_tokens = Bench.make(kernels, sizes=CaptureSizes(2, 8, BLOCK_SIZE)).captured
    assert few_tokens.takes(make_step([1, 0, 0], [1, 1, 1], [0] * 8)), "as many rows as there may be sequences"


def test_the_reference_captures_nothing():
    model = load(Kernels(REFERENCE, torch.float32))
    assert model.capture(torch.empty(0), SIZES) is None
