"""`quantization_config`: what of it is read, and that everything else is refused by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from blockyard.model_config.fields import Fields
from blockyard.model_config.parallel_sizes import count_leaves
from blockyard.model_config.stored_weights import Packing, StoredWeights, read_stored_weights

WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
TOKENS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BYTES: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(form: str, weights: Any, inputs: Any = None, **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"], **others}


WORDS = compressed("pack-quantized", WEIGHTS)
W8A8 = compressed("int-quantized", BYTES, TOKENS)


def read(config: Any, name: str = "quantization_config") -> tuple[StoredWeights | None, Fields]:
    fields = Fields({name: deepcopy(config)})
    return read_stored_weights(fields), fields


@pytest.mark.parametrize(
    ("config", "packing", "bits", "group", "is_symmetric", "is_ordered"),
    [
        (W8A8, Packing.BYTES, 8, 0, True, False),
        (WORDS, Packing.WORDS, 4, 128, True, False),
        (compressed("pack-quantized", {**WEIGHTS, "symmetric": False}), Packing.WORDS, 4, 128, False, False),
        (compressed("pack-quantized", {**WEIGHTS, "strategy": "channel"}), Packing.WORDS, 4, 0, True, False),
        (compressed("pack-quantized", {**WEIGHTS, "actorder": "group"}), Packing.WORDS, 4, 128, True, True),
        (compressed("pack-quantized", {**WEIGHTS, "actorder": "weight"}), Packing.WORDS, 4, 128, True, False),
        (AWQ, Packing.AWQ, 4, 128, False, False),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, Packing.AWQ, 4, 0, False, False),
        (GPTQ, Packing.GPTQ, 4, 128, True, False),
        ({**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2"}, Packing.GPTQ_V2, 4, 0, True, False),
        ({**GPTQ, "desc_act": True, "sym": False}, Packing.GPTQ, 4, 128, False, True),
    ],
)
def test_a_format_is_read(
    config: Any, packing: Packing, bits: int, group: int, is_symmetric: bool, is_ordered: bool
) -> None:
    stored, fields = read(config)
    assert not fields.violations
    assert not fields.remarks
    assert stored is not None
    assert (stored.packing, stored.bits, stored.group) == (packing, bits, group)
    assert (stored.is_symmetric, stored.is_ordered) == (is_symmetric, is_ordered)


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "fp8"}, "has quant_method 'fp8'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "has quant_method 'bitsandbytes'"),
    ({"quant_method": "mxfp4"}, "has quant_method 'mxfp4'"),
    ({}, "has quant_method None"),
    ("int4", "has quant_method None"),
    ({**AWQ, "bits": 3}, "has weights of 3 bits, not 4"),
    ({**AWQ, "version": "gemv"}, "has version 'gemv' of AWQ"),
    ({**AWQ, "zero_point": False}, "has AWQ without zero points"),
    ({**AWQ, "group_size": 16}, "has groups of 16 weights: they must be multiples of 32"),
    ({**AWQ, "group_size": True}, "has groups of True weights"),
    ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert that are no list of names"),
    ({**GPTQ, "bits": 8}, "has weights of 8 bits, not 4"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "has checkpoint_format 'marlin'"),
    ({**GPTQ, "is_marlin_format": True}, "has is_marlin_format True"),
    ({**GPTQ, "pack_dtype": "int16"}, "has pack_dtype 'int16'"),
    ({**GPTQ, "dynamic": {"-:.*": {}}}, "has dynamic, which is not supported"),
    ({**GPTQ, "modules_in_block_to_quantize": "q"}, "modules_in_block_to_quantize that are no lists of names"),
    (compressed("float-quantized", BYTES, TOKENS), "has format 'float-quantized'"),
    (compressed("nvfp4-pack-quantized", WEIGHTS), "has format 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", {**WEIGHTS, "num_bits": 8}), "has weights of num_bits 8, not 4"),
    (compressed("pack-quantized", {**WEIGHTS, "type": "float"}), "has weights of type 'float'"),
    (compressed("pack-quantized", {**WEIGHTS, "strategy": "tensor"}), "has weights of strategy 'tensor'"),
    (compressed("pack-quantized", {**WEIGHTS, "group_size": 48}), "has groups of 48 weights"),
    (compressed("pack-quantized", {**WEIGHTS, "actorder": "mine"}), "has weights of actorder 'mine'"),
    (compressed("pack-quantized", WEIGHTS, TOKENS), "quantizes inputs beside weights of 4 bits"),
    (compressed("pack-quantized", None), "has weights of num_bits None"),
    (compressed("int-quantized", BYTES), "leaves the inputs of 8-bit weights as they are"),
    (compressed("int-quantized", BYTES, {**TOKENS, "dynamic": False}), "has static scales of activations"),
    (compressed("int-quantized", BYTES, {**TOKENS, "strategy": "tensor"}), "otherwise than in 8 bits, token by token"),
    (compressed("int-quantized", BYTES, {**TOKENS, "symmetric": False}), "quantizes inputs asymmetrically"),
    (compressed("int-quantized", {**BYTES, "symmetric": False}, TOKENS), "that are asymmetric in 8 bits"),
    (compressed("int-quantized", {**BYTES, "strategy": "tensor"}, TOKENS), "has weights of strategy 'tensor'"),
    ({**WORDS, "kv_cache_scheme": {"num_bits": 8}}, "has kv_cache_scheme"),
    ({**WORDS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "has sparsity_config"),
    ({**WORDS, "transform_config": {"config_groups": {}}}, "has transform_config"),
    ({**WORDS, "config_groups": {}}, "must have one of config_groups"),
    ({**WORDS, "config_groups": {"a": {}, "b": {}}}, "must have one of config_groups"),
    ({**WORDS, "ignore": ["re:("]}, "which is no regular expression"),
    ({**WORDS, "ignore": "lm_head"}, "has ignore that are no list of names"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED)
def test_everything_else_is_refused_by_name(config: Any, told: str) -> None:
    stored, fields = read(config)
    assert stored is None
    texts = [violation.description for violation in fields.violations]
    assert any(told in text for text in texts), texts
    assert all("or the model's original weights" in text for text in texts)


def test_other_fields_of_the_same_meaning() -> None:
    assert read(WORDS, "compression_config")[0] == read(WORDS)[0]
    assert read({"bits": 4}, "quantization")[0] is None
    both = Fields({"quantization_config": WORDS, "compression_config": WORDS})
    assert read_stored_weights(both) is None
    assert both.violations
    assert read({**AWQ, "surprise": 1})[1].remarks == [
        "fields of quantization_config that are not known, and not read: surprise"
    ]
    assert read_stored_weights(Fields({})) is None


@pytest.mark.parametrize(
    ("config", "covered", "left"),
    [
        ({**WORDS, "ignore": ["lm_head", "model.a"]}, ["model.ab", "model.b"], ["lm_head", "model.a"]),
        ({**WORDS, "ignore": ["re:.*mlp.gate$"]}, ["model.1.mlp.gate_proj"], ["model.1.mlp.gate"]),
        ({**AWQ, "modules_to_not_convert": ["visual", "down"]}, ["model.up"], ["model.visual.up", "model.down_proj"]),
        (
            {**GPTQ, "modules_in_block_to_quantize": [["attn.q", "attn.k"]]},
            ["m.1.attn.q"],
            ["m.1.attn.v", "m.1.qq"],
        ),
    ],
)
def test_modules_may_be_left_as_they_are(config: Any, covered: list[str], left: list[str]) -> None:
    stored = read(config)[0]
    assert stored is not None
    assert [stored.covers(name) for name in covered] == [True] * len(covered)
    assert [stored.covers(name) for name in left] == [False] * len(left)


def test_the_head_is_not_quantized_but_where_it_says_so() -> None:
    heads = [read(config)[0] for config in (AWQ, GPTQ, {**GPTQ, "lm_head": True}, WORDS)]
    assert [stored.has_head for stored in heads if stored] == [False, False, True, True]


def test_groups_are_held_as_kernels_have_them_and_no_leaf_cuts_one() -> None:
    def stored(group: int) -> StoredWeights:
        return StoredWeights(packing=Packing.GPTQ, bits=4, group=group, is_symmetric=True)

    assert [stored(group).held_group(1536) for group in (32, 64, 96, 128, 256, 0)] == [32, 64, 32, 128, 128, 128]
    assert [stored(0).held_group(width) for width in (96, 192, 896)] == [32, 64, 128]
    assert [count_leaves(4864, stored(group).leaf_unit(4864)) for group in (32, 64, 128)] == [8, 4, 2]
    assert stored(128).misfit(896) == ""
    assert stored(128).misfit(960) == "960 inputs are not a multiple of 128"
    assert stored(0).misfit(48) == "48 inputs are not a multiple of 32"
