"""Networks cut among ranks give the bits of those on one, whatever their number."""

from __future__ import annotations

import random

import pytest
import torch

from blockyard.contract.parallel import Parallel
from blockyard.model_config.parallel_sizes import legal_tensor_sizes, vocabulary_share
from blockyard.model_config.share import Share, stage_layers
from tests.kit.kernels.backends import BEST, EMULATED, REFERENCE, Kernels
from tests.kit.kernels.ranks import Ranks, new_backend
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.models.model_config import read_config

KERNELS = [
    *(Kernels(name, dtype) for name in (REFERENCE, BEST) for dtype in (torch.float32, torch.bfloat16)),
    *(Kernels(name, torch.bfloat16) for name in EMULATED),
]
LENGTH = 70
PIECES = [33, 1, 1, 20, 15]


def token_ids(seed: int = 1) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(LENGTH)]


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama_bias", "qwen3"])
def test_ranks_compute_the_bits_of_one(kernels: Kernels, name: str, size: int):
    alone = StepRunner.load(tiny_model(name), kernels.dtype, new_backend(kernels))
    expected = alone.run("all", token_ids(), PIECES)
    ranks = Ranks(tiny_model(name), kernels, size)
    assert torch.equal(ranks.logits(token_ids(), PIECES), expected)
    if kernels.is_reference:
        return
    for runner in ranks.runners:
        runner.capture(64, max_length=256)
    assert torch.equal(ranks.logits(token_ids(), PIECES), expected)
    assert all(runner.num_replayed == len(PIECES) for runner in ranks.runners)


@pytest.mark.parametrize("size", [2, 4])
def test_so_they_do_in_int8(size: int):
    kernels, folder = Kernels(BEST, torch.bfloat16), tiny_model("qwen3")
    alone = StepRunner.load(folder, kernels.dtype, new_backend(kernels, "int8"))
    expected = alone.run("all", token_ids(), PIECES)
    assert torch.equal(Ranks(folder, kernels, size, "int8").logits(token_ids(), PIECES), expected)


def test_a_rank_holds_its_share_of_the_weights():
    kernels = Kernels(BEST, torch.bfloat16)
    whole = StepRunner.load(tiny_model("qwen3"), kernels.dtype, new_backend(kernels)).model.parameter_bytes
    shares = [runner.model.parameter_bytes for runner in Ranks(tiny_model("qwen3"), kernels, 2).runners]
    assert all(share < 0.55 * whole for share in shares)
    assert sum(shares) >= whole


def test_a_share_is_what_the_ranks_have_not_in_common():
    config = read_config(tiny_model("qwen3"), torch.bfloat16)
    shares = [Share.of(config, Parallel(tensor_parallel_size=4, rank=rank)) for rank in range(4)]
    assert [list(share.heads) for share in shares] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [1], [1]], "held twice"
    assert [token for share in shares for token in share.vocabulary] == list(range(VOCAB_SIZE))
    inner = config.intermediate_size
    assert [feature for share in shares for feature in share.part(inner)] == list(range(inner))


def test_sizes_that_a_network_can_be_cut_for():
    assert legal_tensor_sizes(read_config(tiny_model("qwen3"), torch.bfloat16)) == (1, 2, 4)
    assert legal_tensor_sizes(read_config(tiny_model("llama"), torch.bfloat16)) == (1, 2, 4)


def test_the_vocabulary_is_cut_in_whole_panels():
    assert [vocabulary_share(384, size) for size in (1, 2, 4, 8)] == [384, 192, 96, 64]
    assert vocabulary_share(32000, 8) == 4000


@pytest.mark.parametrize(
    ("num_layers", "stages", "sizes"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [2, 3, 2]), (30, 4, [7, 8, 8, 7])]
)
def test_stages_at_the_ends_are_the_smaller_ones(num_layers: int, stages: int, sizes: list[int]):
    parts = [stage_layers(num_layers, stages, stage) for stage in range(stages)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(num_layers))
