"""A tiny seeded model of each architecture, saved by transformers, with settings that make a difference.

Each has two key-value heads if it may, four layers so that every kind of layer occurs, and windows shorter than a text.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 384
WINDOW = 40

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_KINDS = ["sliding_attention", "full_attention"] * 2
_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
_TWO_ROTARIES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "intermediate_size": 64}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * number for number in range(12)],
    "long_factor": [1.5 + 0.3 * number for number in range(12)],
}
_ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32}
_TEXT_LEFT_OUT = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXT: dict[str, Any] = {name: value for name, value in SIZES.items() if name not in _TEXT_LEFT_OUT}
# Eyes that are there, and see nothing.
_LOOKS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_LOOKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 96}
_PARTS = {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 1e4}
_ROTATED: dict[str, Any] = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
_SHARED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_ROTATED, "rope_type": "default", "mrope_section": [2, 1, 1]},
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24}
_OPT_LEFT_OUT = ("intermediate_size", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How transformers makes one."""

    architecture: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()
    """Sizes that it does not have."""

    @property
    def fields(self) -> dict[str, Any]:
        """What its configuration is made of."""
        return {**{name: value for name, value in SIZES.items() if name not in self.left_out}, **self.changes}


RECIPES = {
    "llama": Recipe("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Recipe("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": Recipe("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Recipe("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "qwen3_5": Recipe("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DELTA),
    "lfm2": Recipe(
        "Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32}
    ),
    "qwen3_5_moe": Recipe(
        "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_DELTA, **_SHARED}, ("intermediate_size",)
    ),
    "qwen3_next": Recipe(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**_DELTA, **_SHARED, "rope_parameters": {**_ROTATED, "rope_type": "default"}, "mlp_only_layers": [1]},
    ),
    "lfm2_moe": Recipe(
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.3,
        },
    ),
    "gemma": Recipe("GemmaForCausalLM", "GemmaConfig", {"head_dim": 32}),
    "gemma2": Recipe(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": Recipe(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, "head_dim": 24, "layer_types": _KINDS, "rope_parameters": _TWO_ROTARIES},
    ),
    "granite": Recipe(
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 11.3,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "granite_hybrid": Recipe(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "intermediate_size": 64,
            "shared_intermediate_size": 160,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
        },
    ),
    "bamba": Recipe("BambaForCausalLM", "BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "nemotron_h": Recipe(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention"],
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 24,
            # transformers lengthens shorter time steps to this in a prefill, and leaves them as they are in decoding.
            "time_step_min": 1e-9,
        },
        ("num_hidden_layers",),
    ),
    "granite_dense": Recipe(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 4,
            "shared_intermediate_size": 160,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.7,
        },
    ),
    "smollm3": Recipe("SmolLM3ForCausalLM", "SmolLM3Config"),
    "phi3": Recipe("Phi3ForCausalLM", "Phi3Config", {"hidden_size": 128, "partial_rotary_factor": 0.75}),
    "phi3_longrope": Recipe(
        "Phi3ForCausalLM",
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "ministral3": Recipe(
        "Ministral3ForCausalLM", "Ministral3Config", {"rope_parameters": _YARN, "head_dim": 32, "rms_norm_eps": 1e-5}
    ),
    "hunyuan": Recipe("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {"head_dim": 32, "rope_parameters": _ALPHA}),
    "gemma3_multimodal": Recipe(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**_TEXT, **_GEMMA, "layer_types": _KINDS, "rope_parameters": _TWO_ROTARIES},
            "vision_config": {**_LOOKS, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
        tuple(_TEXT),
    ),
    "mistral3_multimodal": Recipe(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**_TEXT, "model_type": "ministral3", "head_dim": 32, "rope_parameters": _YARN},
            "vision_config": {**_LOOKS, "model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
            "tie_word_embeddings": False,
        },
        tuple(_TEXT),
    ),
    "qwen2_vl_multimodal": Recipe(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _PARTS},
            "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 96},
        },
        tuple(_TEXT),
    ),
    "qwen2_5_vl_multimodal": Recipe(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": {**_TEXT, "rope_parameters": _PARTS}, "vision_config": _QWEN_LOOKS},
        tuple(_TEXT),
    ),
    "qwen3_vl_multimodal": Recipe(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**_TEXT, "head_dim": 24, "rope_parameters": {**_PARTS, "mrope_interleaved": True}},
            "vision_config": {**_QWEN_LOOKS, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        tuple(_TEXT),
    ),
    "qwen3_5_multimodal": Recipe(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": {**_TEXT, **_DELTA}, "vision_config": {**_QWEN_LOOKS, "num_position_embeddings": 16}},
        tuple(_TEXT),
    ),
    "qwen3_5_moe_multimodal": Recipe(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {
            "text_config": {**_TEXT, **_DELTA, **_SHARED},
            "vision_config": {**_QWEN_LOOKS, "num_position_embeddings": 16},
        },
        tuple(_TEXT),
    ),
    "glm": Recipe("GlmForCausalLM", "GlmConfig", {"head_dim": 32}),
    "glm4": Recipe("Glm4ForCausalLM", "Glm4Config", {"head_dim": 32}),
    "ernie": Recipe("Ernie4_5ForCausalLM", "Ernie4_5Config", {"use_bias": True, "head_dim": 32}),
    "seed_oss": Recipe(
        "SeedOssForCausalLM", "SeedOssConfig", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}
    ),
    "arcee": Recipe("ArceeForCausalLM", "ArceeConfig", {"mlp_bias": True}),
    "ministral": Recipe("MinistralForCausalLM", "MinistralConfig", {"sliding_window": WINDOW, "head_dim": 32}),
    "helium": Recipe("HeliumForCausalLM", "HeliumConfig", {"head_dim": 24, "mlp_bias": True}),
    "olmo": Recipe("OlmoForCausalLM", "OlmoConfig"),
    "olmo2": Recipe("Olmo2ForCausalLM", "Olmo2Config"),
    "olmo3": Recipe("Olmo3ForCausalLM", "Olmo3Config", {"sliding_window": WINDOW, "layer_types": _KINDS}),
    "exaone4": Recipe("Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": WINDOW}),
    "cohere": Recipe("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.7}),
    "cohere2": Recipe("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": WINDOW, "logit_scale": 0.7}),
    "stablelm": Recipe("StableLmForCausalLM", "StableLmConfig", {"use_qkv_bias": True, "hidden_size": 128}),
    "stablelm_parallel": Recipe(
        "StableLmForCausalLM", "StableLmConfig", {"use_parallel_residual": True, "hidden_size": 128}
    ),
    "gpt2": Recipe(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 512},
        tuple(name for name in SIZES if name != "vocab_size" and not name.endswith("token_id")),
    ),
    "opt": Recipe("OPTForCausalLM", "OPTConfig", {"ffn_dim": 160, "word_embed_proj_dim": 96}, _OPT_LEFT_OUT),
    "gpt_neox": Recipe("GPTNeoXForCausalLM", "GPTNeoXConfig", {"hidden_size": 128}, ("num_key_value_heads",)),
    "gpt_neox_serial": Recipe(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"hidden_size": 128, "use_parallel_residual": False},
        ("num_key_value_heads",),
    ),
    "phi": Recipe("PhiForCausalLM", "PhiConfig"),
    "starcoder2": Recipe("Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": WINDOW}),
    "mixtral": Recipe(
        "MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 8, "sliding_window": WINDOW}
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32},
    ),
    "olmoe": Recipe("OlmoeForCausalLM", "OlmoeConfig", {**_EXPERTS, "num_experts": 8, "attention_bias": True}),
    "granite_moe": Recipe(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {
            **_EXPERTS,
            "num_local_experts": 8,
            "embedding_multiplier": 11.3,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "gpt_oss": Recipe(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_EXPERTS,
            "num_local_experts": 8,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
                "rope_theta": 1.5e5,
            },
        },
    ),
    "nemotron": Recipe("NemotronForCausalLM", "NemotronConfig", {"head_dim": 32}),
}


@cache
def family_model(name: str) -> Path:
    """The folder of a model, made once in this process and removed at its end."""
    recipe = RECIPES[name]
    config = getattr(transformers, recipe.config)(**recipe.fields)
    config.architectures = [recipe.architecture]
    folder = home() / name
    make_model(config, folder, seed=sum(name.encode()))
    return folder


def class_of(config: transformers.PreTrainedConfig) -> type[transformers.PreTrainedModel]:
    """The class of transformers that computes the first of a configuration's architectures."""
    return getattr(transformers, config.architectures[0])


@torch.no_grad()
def make_model(config: transformers.PreTrainedConfig, folder: Path, seed: int) -> transformers.PreTrainedModel:
    """Writes a model with random weights: products keep the size of their input, and norms are not all alike.

    What it computes is spelled out: transformers' other ways of attention know no bounded scores.
    """
    # Some numbers, such as sinks, are random from the start.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(config)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    scatter_weights(model, seed)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def scatter_weights(model: torch.nn.Module, seed: int) -> None:
    """Gives a model random weights: products keep the size of their input, and norms are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            is_table = any(part in name for part in ("embed", "wte", "wpe"))
            parameter.copy_(noise * (0.4 if is_table else parameter.shape[1] ** -0.5))
        else:
            parameter.add_(0.1 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


@cache
def home() -> Path:
    """A folder for models of this process, removed at its end."""
    folder = tempfile.mkdtemp(prefix="families-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
