"""Every field that transformers' configurations have, with values that are not the default: our logits are theirs, or
the field is refused by name. None is passed over.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.families.llama import FAMILIES
from blockyard.model_config.fields import Fields
from blockyard.model_config.other_fields import HARMLESS, REFUSED
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.model_config import read_config

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": None,
}
LENGTH = 100
TOKEN_IDS = tuple(torch.randint(0, SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist())
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5, 1.25, 1.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE_CHANGES: list[dict[str, Any]] = [
    {},
    {"original_max_position_embeddings": 4},
    {"original_max_position_embeddings": 4, "factor": 1.0},
    {"original_max_position_embeddings": 4, "attention_factor": 0.7},
    {"short_factor": [1.0] * 3},
    {"long_factor": "2"},
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 10}

# What is tried of each field beside its default: a change of config.json, several fields of it where one alone is idle.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "vocab_size": [{"vocab_size": 64 + 31}],
    "hidden_size": [{"hidden_size": 48}],
    "intermediate_size": [{"intermediate_size": 24}],
    "num_hidden_layers": [{"num_hidden_layers": 1}],
    "num_attention_heads": [{"num_attention_heads": 8}, {"num_attention_heads": 3}],
    "num_key_value_heads": [{"num_key_value_heads": number} for number in (1, 4, 3, None, ...)],
    "head_dim": [{"head_dim": number} for number in (4, 16, 10, 7, None, ...)],
    "hidden_act": [{"hidden_act": name} for name in ("swish", "gelu", "xielu")],
    "rms_norm_eps": [{"rms_norm_eps": epsilon} for epsilon in (0.3, 0.0, -1.0)],
    "attention_bias": [{"attention_bias": True}],
    "mlp_bias": [{"mlp_bias": True}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}],
    "sliding_window": [{"sliding_window": window} for window in (10, 1, 0, 127, 128, ...)],
    "use_sliding_window": [
        SLIDING,
        {"use_sliding_window": True},
        {**SLIDING, "max_window_layers": 0},
        {**SLIDING, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 10},
    ],
    "max_window_layers": [{"max_window_layers": 0}],
    "layer_types": [
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
        {**SLIDING, "layer_types": ["sliding_attention", "sliding_attention"]},
        {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]},
        {**SLIDING, "layer_types": ["full_attention", "chunked_attention"]},
    ],
    "max_position_embeddings": [{"max_position_embeddings": 4000}, {"rope_scaling": LLAMA3}],
    "original_max_position_embeddings": [
        {"original_max_position_embeddings": 16},
        {"original_max_position_embeddings": 16, "rope_scaling": YARN},
        {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3},
        {"original_max_position_embeddings": 16, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    "rope_theta": [{"rope_theta": 100.0}, {"rope_theta": 100.0, "rope_scaling": YARN}],
    "rope_parameters": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 50.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 50.0},
        {"rope_parameters": {"rope_theta": 500.0, **YARN}},
        {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
    "rope_scaling": [
        {"rope_scaling": YARN},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 300.0},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 4.0}},
        {"rope_scaling": {**YARN, "rope_theta": 77.0}, "rope_theta": 1000.0},
        *({"rope_scaling": {**YARN, "original_max_position_embeddings": length}} for length in (1, 4, 8, 200)),
        *({"rope_scaling": {**YARN, "factor": factor}} for factor in (1.0, 0.5, None, "4")),
        *({"rope_scaling": {**YARN, "truncate": truncate}} for truncate in (False, None, 2)),
        *({"rope_scaling": {**YARN, "attention_factor": factor}} for factor in (0.7, 2, None)),
        {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 2}},
        {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 8.0}},
        {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": 0}},
        {"rope_scaling": {**YARN, "mscale": 2.0}},
        {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}},
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        *({"rope_scaling": {**LONGROPE, **more}} for more in LONGROPE_CHANGES),
    ],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
    ],
    "dtype": [{"dtype": "bfloat16"}, {"dtype": "float64"}],
    "torch_dtype": [{"torch_dtype": "float16"}],
    "architectures": [{"architectures": []}, {"architectures": ["BloomForCausalLM"]}],
    "model_type": [{"model_type": name} for name in ("llama", "qwen2", "gemma2")],
    "auto_map": [{"auto_map": {"AutoConfig": "own.Config"}}],
    "quantization_config": [{"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 32}}],
    "compression_config": [{"compression_config": {"quant_method": "compressed-tensors"}}],
    "quantization": [{"quantization": {"bits": 4}}],
    "is_causal": [{"is_causal": False}],
    "is_encoder_decoder": [{"is_encoder_decoder": True}],
    "per_layer_config": [{"per_layer_config": {"0": {"intermediate_size": 24}}}],
}
# Values that a field of no meaning may have: one for each type that transformers asks for.
HARMLESS_VALUES: dict[str, Any] = {
    "bos_token_id": 5,
    "eos_token_id": [5, 6],
    "pad_token_id": 7,
    "initializer_range": 0.5,
    "attention_dropout": 0.4,
    "use_cache": False,
    "return_dict": True,
    "pretraining_tp": 2,
    "chunk_size_feed_forward": 3,
    "output_hidden_states": True,
    "output_attentions": True,
    "id2label": {"0": "A", "1": "B", "2": "C"},
    "label2id": {"A": 0, "B": 1, "C": 2},
    "problem_type": "regression",
    "transformers_version": "4.30.0",
    "tie_last_hidden_states": True,
}
# Of positions every architecture reads the same.
ALIKE = {name for name in CHANGES if "rope" in name or "rotary" in name or "position" in name}
TAKES_NO_NULL = {
    ("MistralForCausalLM", "num_key_value_heads"),
    ("Qwen2ForCausalLM", "head_dim"),
    ("Qwen3ForCausalLM", "head_dim"),
}
CASES = [
    pytest.param(architecture, change, id=f"{architecture}-{field}-{index}")
    for architecture in FAMILIES
    for field, changes in CHANGES.items()
    if architecture == "LlamaForCausalLM" or field not in ALIKE
    for index, change in enumerate(changes)
    if (architecture, field) not in TAKES_NO_NULL or change[field] is not None
]


def base(architecture: str) -> dict[str, Any]:
    fields = {**SIZES, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    return {**fields, "rope_theta": 1000.0}


@torch.no_grad()
def make_weights(folder: Path) -> transformers.PreTrainedModel:
    """Writes the weights of the network that transformers makes of a config.json, and gives it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return model


def known_fields(architecture: str) -> set[str]:
    """The fields of config.json that are read, refused or known to change nothing."""
    fields = Fields({})
    FAMILIES[architecture].read(fields)
    others = {"architectures", "model_type", "auto_map", "dtype", "torch_dtype", "rope_theta"}
    quantized = {"quantization_config", "compression_config", "quantization"}
    return fields.read | HARMLESS | REFUSED.keys() | others | quantized


def refusal(folder: Path) -> BlockyardError | None:
    try:
        read_config(folder, None)
    except BlockyardError as error:
        return error
    return None


@pytest.mark.parametrize(("architecture", "change"), CASES)
@torch.no_grad()
def test_a_field_counts_as_in_transformers_or_is_refused(architecture: str, change: dict[str, Any], tmp_path: Path):
    fields = {name: value for name, value in {**base(architecture), **change}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if (error := refusal(tmp_path)) is not None:
        assert error.reason is Reason.MODEL_NOT_LOADED
        known = known_fields(architecture)
        assert all(violation.field.partition(".")[0] in known for violation in error.violations)
        assert error.violations
        return
    model = make_weights(tmp_path)
    expected = model(torch.tensor([TOKEN_IDS]), return_dict=True).logits[0]
    got = StepRunner.load(tmp_path, torch.float32).run("whole", TOKEN_IDS, [LENGTH])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HARMLESS_VALUES)
@torch.no_grad()
def test_a_field_of_no_meaning_changes_nothing_in_transformers_either(name: str, tmp_path: Path):
    logits: list[torch.Tensor] = []
    for change in ({}, {name: HARMLESS_VALUES[name]}):
        (tmp_path / "config.json").write_text(json.dumps({**base("LlamaForCausalLM"), **change}))
        assert refusal(tmp_path) is None
        logits.append(make_weights(tmp_path)(torch.tensor([TOKEN_IDS]), return_dict=True).logits[0])
    assert torch.equal(*logits)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_is_tried(architecture: str):
    """A field that a new version of transformers brings fails here until it is read, refused or shown harmless."""
    config = transformers.AutoConfig.for_model(FAMILIES[architecture].model_type)
    names = {field.name for field in dataclasses.fields(config)} | {"rope_scaling", "rope_theta", "torch_dtype"}
    assert names <= known_fields(architecture)
    assert names & HARMLESS <= HARMLESS_VALUES.keys()
    assert names - HARMLESS - REFUSED.keys() <= CHANGES.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_other_networks_is_refused_unless_it_changes_nothing(name: str, tmp_path: Path):
    for value in (0.25, "other", [3], {"a": 1}):
        (tmp_path / "config.json").write_text(json.dumps({**base("LlamaForCausalLM"), name: value}))
        error = refusal(tmp_path)
        assert error is not None
        assert [violation.field for violation in error.violations] == [name]
    for value in (None, *REFUSED[name]):
        (tmp_path / "config.json").write_text(json.dumps({**base("LlamaForCausalLM"), name: value}))
        assert refusal(tmp_path) is None
