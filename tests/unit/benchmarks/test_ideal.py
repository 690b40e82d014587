"""The arithmetic of the ideal, against counting by hand and against the models themselves."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.ceilings import Ceilings, Rate
from benchmarks.kit import ideal, models

SHAPE = ideal.Shape(
    hidden_size=8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2, intermediate_size=16, vocab_size=32, tied=True
)
# Of one layer: qkv 16x8, output 8x8, gate and up 32x8, down 8x16.
LAYER_WEIGHTS = 128 + 64 + 256 + 128
HEAD_WEIGHTS = 32 * 8
MACHINE = ideal.Machine(bandwidth=1e3, matrix_rate=1e4, attention_rate=1e4, weight_bytes=2, kv_bytes=2)


def test_counts_weights():
    assert sum(rows * columns for rows, columns in SHAPE.layer_matrices) == LAYER_WEIGHTS
    assert SHAPE.num_layer_weights == 3 * LAYER_WEIGHTS
    assert SHAPE.num_head_weights == HEAD_WEIGHTS
    assert SHAPE.num_weights == 3 * LAYER_WEIGHTS + HEAD_WEIGHTS
    assert replace(SHAPE, tied=False).num_weights == 3 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS


def test_counts_keys_and_values():
    assert SHAPE.num_kv_elements == 3 * 2 * 2 * 2


@pytest.mark.parametrize("name", models.RECIPES)
def test_reads_the_shape_that_a_models_weights_have(tmp_path, name):
    recipe = models.RECIPES[name]
    (tmp_path / "config.json").write_text(json.dumps(models.configuration(recipe)))
    matrices = [shape for _, shape in models.weight_shapes(recipe) if len(shape) == 2]
    assert ideal.Shape.read(tmp_path).num_weights == sum(map(math.prod, matrices))


def test_reads_old_and_sparse_configurations(tmp_path):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 7, "head_dim": None}))
    assert ideal.Shape.read(tmp_path) == ideal.Shape(12, 1, 3, 3, 4, 7, 5, tied=False)


def test_a_lone_decode_streams_all_weights_and_its_keys_and_values():
    context = 10
    num_bytes = 2 * (3 * LAYER_WEIGHTS + HEAD_WEIGHTS) + context * 24 * 2
    assert ideal.decode_seconds(SHAPE, MACHINE, 1, context) == pytest.approx(num_bytes / 1e3)


def test_a_large_batch_is_bound_by_arithmetic():
    slow = replace(MACHINE, matrix_rate=100.0, attention_rate=50.0)
    # Four heads of two elements, a product with a key and one with a value, in three layers.
    attention = 64 * 10 * (3 * 4 * 2 * 2 * 2)
    products = 64 * 2 * (3 * LAYER_WEIGHTS + HEAD_WEIGHTS)
    assert ideal.decode_seconds(SHAPE, slow, 64, 10) == pytest.approx(products / 100 + attention / 50)


def test_the_table_of_untied_embeddings_is_not_streamed():
    untied = replace(SHAPE, tied=False)
    assert ideal.decode_seconds(untied, MACHINE, 1, 10) == ideal.decode_seconds(SHAPE, MACHINE, 1, 10)


@given(st.integers(1, 60))
def test_a_prompt_is_the_sum_of_its_tokens_with_one_head(num_tokens):
    products, attention = ideal.prompt_operations(SHAPE, num_tokens)
    assert products == num_tokens * 2 * 3 * LAYER_WEIGHTS + 2 * HEAD_WEIGHTS
    assert attention == sum(96 * position for position in range(1, num_tokens + 1))
    assert ideal.prompt_seconds(SHAPE, MACHINE, num_tokens) == pytest.approx((products + attention) / 1e4)


def test_a_run_is_its_prompts_and_a_step_for_each_further_token():
    prompts = 4 * ideal.prompt_seconds(SHAPE, MACHINE, 5)
    assert ideal.run_seconds(SHAPE, MACHINE, 4, 5, 1) == pytest.approx(prompts)
    steps = sum(ideal.decode_seconds(SHAPE, MACHINE, 4, context) for context in (6, 7))
    assert ideal.run_seconds(SHAPE, MACHINE, 4, 5, 3) == pytest.approx(prompts + steps)


@given(st.integers(1, 100), st.integers(1, 200), st.integers(1, 50), st.floats(1.0, 4.0))
def test_a_faster_machine_is_never_slower(batch_size, num_prompt_tokens, num_output_tokens, factor):
    faster = replace(MACHINE, bandwidth=MACHINE.bandwidth * factor, matrix_rate=MACHINE.matrix_rate * factor)
    size = (batch_size, num_prompt_tokens, num_output_tokens)
    assert ideal.run_seconds(SHAPE, faster, *size) <= ideal.run_seconds(SHAPE, MACHINE, *size)
    twice = replace(faster, bandwidth=2 * MACHINE.bandwidth, matrix_rate=2e4, attention_rate=2e4)
    assert ideal.run_seconds(SHAPE, twice, *size) == pytest.approx(ideal.run_seconds(SHAPE, MACHINE, *size) / 2)


def test_takes_the_best_of_the_ceilings_and_attention_without_tiles():
    rates = {"vfmadd231ps zmm": 20.0, "vdpbf16ps zmm": 30.0, "vpdpbusd zmm": 40.0}
    vectors = Ceilings(2, Rate(1.0, 10.0), {name: Rate(1.0, best) for name, best in rates.items()})
    assert ideal.machine_for(vectors, "bfloat16") == ideal.Machine(10.0, 30.0, 30.0, 2, 2)
    assert ideal.machine_for(vectors, "float32") == ideal.Machine(10.0, 20.0, 20.0, 4, 4)
    assert ideal.machine_for(vectors, "bfloat16", "int8") == ideal.Machine(10.0, 40.0, 30.0, 1, 2)
    tiles = replace(vectors, rates={**vectors.rates, "tdpbf16ps": Rate(1.0, 200.0), "tdpbusd": Rate(1.0, 400.0)})
    assert ideal.machine_for(tiles, "bfloat16") == ideal.Machine(10.0, 200.0, 30.0, 2, 2)
    assert ideal.machine_for(tiles, "bfloat16", "int8") == ideal.Machine(10.0, 400.0, 30.0, 1, 2)


def test_tells_what_one_request_may_reach_where_it_was_measured_before():
    """135 M parameters at 84.5 GB/s: 314 tokens a second, less what the keys and values take."""
    shape = ideal.Shape(576, 30, 9, 3, 64, 1536, 49152, tied=True)
    machine = ideal.Machine(84.5e9, 1.08e12, 1.08e12, 2, 2)
    assert 1 / ideal.decode_seconds(shape, machine, 1, 1) == pytest.approx(314, rel=0.01)
