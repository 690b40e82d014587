"""config.json, as transformers 5 and its elders write it; what is not supported says what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.network import find_violations
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.models.model_config import ModelConfig, read_config

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}


@pytest.fixture
def read(tmp_path: Path):
    def read(fields: dict[str, Any], dtype: torch.dtype | None = None) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_config(tmp_path, dtype)

    return read


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.attention.qkv_bias, config.attention.output_bias, config.layers[0].feed.has_bias


def test_defaults(read: Any):
    config = read(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_model_len) == (4, 16, 512)
    assert config.dtype is torch.float32
    assert config.windows == (None, None, None)
    assert config.sliding_window is None
    assert config.rotaries[0].theta == 10000.0
    assert biases(config) == (False, False, False)
    assert config.attention.qk_norm is None
    assert not config.head.is_tied
    assert {layer.norm.epsilon for layer in config.layers} == {config.final_norm.epsilon} == {1e-6}


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_the_dtype_is_the_files_unless_told(read: Any, fields: dict[str, Any]):
    assert read({**LLAMA, **fields}).dtype is torch.bfloat16
    assert read({**LLAMA, **fields}, torch.float16).dtype is torch.float16


def test_biases(read: Any):
    assert biases(read({**LLAMA, "attention_bias": True, "mlp_bias": True})) == (True, True, True)
    assert biases(read({**QWEN2, "attention_bias": False})) == (True, False, False)


def test_qwen3_has_norms_and_wide_heads(read: Any):
    config = read({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert config.attention.qk_norm is not None
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({**LLAMA, "sliding_window": 512}, (None, None, None)),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64, 64)),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 9999}, (4096, 4096, 4096)),
        (QWEN2, (None, None, None)),
        ({**QWEN2, "use_sliding_window": True}, (None, None, None)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, (None, 64, 64)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, (64, 64, 64)),
        (
            {
                **QWEN2,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, None, 64),
        ),
    ],
)
def test_windows(read: Any, fields: dict[str, Any], windows: tuple[int | None, ...]):
    config = read(fields)
    assert config.windows == windows
    assert config.sliding_window == next((window for window in windows if window), None)


@pytest.mark.parametrize(
    ("fields", "kind", "theta", "max_len"),
    [
        ({"rope_theta": 5e5}, "default", 5e5, 512),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 5e5, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 2e4}, "linear", 2e4, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn", 1e4, 2048),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            "yarn",
            1e4,
            512,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            "llama3",
            1e4,
            512,
        ),
        ({"rope_scaling": None}, "default", 1e4, 512),
        ({"max_position_embeddings": 10**30}, "default", 1e4, 2**31 - 1),
    ],
)
def test_rotary_embeddings(read: Any, fields: dict[str, Any], kind: str, theta: float, max_len: int):
    config = read({**LLAMA, **fields})
    assert (config.rotaries[0].kind, config.rotaries[0].theta, config.max_model_len) == (kind, theta, max_len)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["BloomForCausalLM"]}, r"'BloomForCausalLM' is not supported \(supported: Llama.*Qwen3"),
        ({"architectures": []}, r"names no architecture \(supported: "),
        ({"architectures": ["MyModel"], "auto_map": {"AutoModel": "my.MyModel"}}, "such code is never run"),
        ({"quantization_config": {"quant_method": "hqq"}}, "has quant_method 'hqq'.*or the model's original weights"),
        ({"hidden_act": "xielu"}, r"hidden_act is 'xielu', not supported \(supported: silu"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn': set --dtype to one of float32"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic' \(supported: default, linear"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor in rope_scaling must be a list of numbers above 0"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "short_factor and long_factor must have"),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "a length above 1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "type 'linear' need factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "type 'llama3' need low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"rope_scaling": ["linear", 2.0]}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"sliding_window": 64}, "sliding_window.*does not have"),
        ({"mlp_bias": "false"}, "mlp_bias must be true or false, not 'false'"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5, which is not supported"),
        ({"is_causal": False}, "is_causal is False"),
        (
            {"architectures": ["MistralForCausalLM"], "attention_bias": True},
            "attention_bias, which this architecture does not have",
        ),
        ({"model_type": "qwen2"}, "LlamaForCausalLM and the model_type 'qwen2' of another"),
        ({"auto_map": {"AutoModel": "my.MyModel"}}, r"such code is never run \(take it out"),
        ({"hidden_size": 10**12}, "more than 2147483647"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, not nan"),
    ],
)
def test_what_is_not_supported_says_what_to_do(read: Any, fields: dict[str, Any], complaint: str):
    with pytest.raises(BlockyardError, match=complaint) as caught:
        read({**LLAMA, **fields})
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


def test_the_first_architecture_that_is_supported_counts(read: Any):
    names = ["YiForCausalLM", "MistralForCausalLM", "LlamaForCausalLM"]
    config = read({**LLAMA, "architectures": names, "model_type": "yi", "sliding_window": 64})
    assert config.architecture == "MistralForCausalLM"
    assert config.sliding_window == 64
    with pytest.raises(BlockyardError, match="'YiForCausalLM', 'MptForCausalLM' is not supported"):
        read({**LLAMA, "architectures": ["YiForCausalLM", "MptForCausalLM"]})


def test_everything_that_is_wrong_is_told_at_once(read: Any, tmp_path: Path):
    with pytest.raises(BlockyardError) as caught:
        read({**LLAMA, "hidden_act": "xielu", "vocab_size": "100", "rope_scaling": {"type": "yarn", "factor": "4"}})
    assert [violation.field for violation in caught.value.violations] == [
        "vocab_size",
        "rope_scaling.factor",
        "hidden_act",
    ]
    assert caught.value.message.count("; ") == 2
    assert "\n" not in caught.value.message
    assert find_violations(tmp_path) == caught.value.violations


def test_fields_that_nobody_knows_are_remarked(read: Any):
    assert read(LLAMA).remarks == ()
    (remark,) = read({**LLAMA, "my_field": 3, "initializer_range": 0.1, "other": None}).remarks
    assert remark.endswith("not read: my_field, other")
    theta = {"rope_type": "default", "rope_theta": 1e6}
    (remark,) = read({**LLAMA, "rope_parameters": theta, "rope_scaling": {"type": "linear", "factor": 2.0}}).remarks
    assert "rope_theta 1000000.0 is in rope_parameters alone, and not used" in remark


def test_layer_types_must_fit(read: Any):
    for types in (5, ["full_attention"], ["full_attention", "linear_attention", "full_attention"]):
        with pytest.raises(BlockyardError, match="layer_types"):
            read({**QWEN2, "use_sliding_window": True, "layer_types": types})


def test_a_missing_or_damaged_file(tmp_path: Path):
    with pytest.raises(BlockyardError, match=r"has no config\.json"):
        read_config(tmp_path, None)
    for content in (b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(BlockyardError, match="download it again"):
            read_config(tmp_path, None)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(BlockyardError, match=r"config.json cannot be read: it is no regular file"):
        read_config(tmp_path, None)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "qwen3", "llama_yarn"])
def test_it_reads_what_transformers_writes(name: str):
    config = read_config(tiny_model(name), None)
    assert config.architecture.lower().startswith(name.split("_")[0])
    assert config.vocab_size == 384
    assert config.max_model_len == 2048
