"""Which parallel sizes a model allows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.network import read_network
from blockyard.model_config.parallel_sizes import check_sizes, legal_tensor_sizes

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    return read_network(folder)


def resized(config: DecoderConfig, heads: int, kv_heads: int, inner: int, vocab_size: int) -> DecoderConfig:
    layer = config.layers[0]
    attention = replace(layer.mixer, num_heads=heads, num_kv_heads=kv_heads, head_dim=64)
    layers = (replace(layer, mixer=attention, feed=replace(layer.feed, inner_features=inner)),) * config.num_layers
    return replace(config, layers=layers, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "intermediate_size", "legal"),
    [
        # The shape of a model with 1.1 billion weights, and larger ones.
        (32, 4, 5632, (1, 2, 4, 8)),
        (32, 8, 14336, (1, 2, 4, 8)),
        # That of one with 135 million: its heads are odd.
        (9, 3, 1536, (1,)),
        # Fewer heads of keys and values than ranks: each stands on several.
        (32, 2, 5632, (1, 2, 4, 8)),
        (16, 1, 5632, (1, 2, 4)),
        # Heads that neither divide the ranks nor are divided by them.
        (12, 6, 3072, (1, 2)),
        (24, 3, 8192, (1,)),
        # Leaves would be too short.
        (32, 4, 1024, (1, 2, 4)),
        # The inner features have too few factors of two.
        (32, 4, 5640, (1,)),
    ],
)
def test_sizes_follow_from_heads_and_leaves(
    config: DecoderConfig, num_heads: int, num_kv_heads: int, intermediate_size: int, legal: tuple[int, ...]
) -> None:
    shape = resized(config, num_heads, num_kv_heads, intermediate_size, vocab_size=32000)
    assert legal_tensor_sizes(shape) == legal


def test_no_rank_is_without_tokens(config: DecoderConfig) -> None:
    shape = resized(config, 32, 4, 5632, vocab_size=384)
    sizes = {vocab_size: legal_tensor_sizes(replace(shape, vocab_size=vocab_size)) for vocab_size in (384, 448, 449)}
    assert sizes == {384: (1, 2, 4), 448: (1, 2, 4), 449: (1, 2, 4, 8)}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2), (4, 1), (1, 2)])
def test_what_is_legal_passes(config: DecoderConfig, tensor: int, pipeline: int) -> None:
    check_sizes(config, Parallel(tensor, pipeline))


@pytest.mark.parametrize(("tensor", "pipeline"), [(8, 1), (1, 3)])
def test_what_is_not_is_refused_with_a_list_of_what_is(config: DecoderConfig, tensor: int, pipeline: int) -> None:
    with pytest.raises(BlockyardError, match="size of 1 or 2 or 4 and a pipeline-parallel size of 1 to 2") as raised:
        check_sizes(config, Parallel(tensor, pipeline))
    assert raised.value.reason is Reason.MODEL_NOT_LOADED
