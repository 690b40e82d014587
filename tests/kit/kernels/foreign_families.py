"""Tiny seeded models of architectures that transformers' code computes, and of some that are refused."""

from __future__ import annotations

import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import transformers

from tests.kit.kernels.families import SIZES, WINDOW, home, make_model

if TYPE_CHECKING:
    from pathlib import Path

_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_HEADS = {"head_dim": 32}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}

SERVED: dict[str, dict[str, Any]] = {
    "ApertusConfig": {},
    "CwmConfig": {"sliding_window": WINDOW, "head_dim": 24},
    "FlexOlmoConfig": _EXPERTS,
    "GPTBigCodeConfig": {"n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 160},
    "HyperCLOVAXConfig": {},
    "Jais2Config": {},
    "ModernBertDecoderConfig": {"local_attention": WINDOW},
    "NanoChatConfig": {},
    "PersimmonConfig": {"hidden_size": 128},
    "VaultGemmaConfig": {**_HEADS, "query_pre_attn_scalar": 20, "sliding_window": WINDOW},
    "BitNetConfig": {},
    "AfmoeConfig": {**_EXPERTS, **_HEADS, "sliding_window": WINDOW, "global_attn_every_n_layers": 2},
    "Dots1Config": {**_EXPERTS, "sliding_window": WINDOW},
    # Shared experts, one of them behind a sigmoid, and routers whose choice has a bias of its own.
    "Qwen2MoeConfig": {**_EXPERTS, "shared_expert_intermediate_size": 80},
    "Glm4MoeConfig": {**_EXPERTS, **_HEADS},
    "Ernie4_5_MoeConfig": {**_EXPERTS, "moe_num_experts": 6, "moe_k": 2},
    "GptOssConfig": {**_EXPERTS, **_HEADS, "sliding_window": WINDOW},
}
"""By the configuration that transformers has for it: what is not as of `families.SIZES`."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DiffLlamaConfig": ({}, "attends more than once"),
    "DogeConfig": ({}, "by a mask of its own, or by none"),
    "DeepseekV3Config": ({**_EXPERTS, **_LATENT}, "24, 24 and 20 numbers a head"),
    "Gemma4TextConfig": ({**_HEADS, "sliding_window": WINDOW}, "layers differ in their heads"),
    "Lfm2Config": ({}, "it does not run without its weights"),
    "FalconConfig": ({}, "its attention cannot be replaced"),
    "Llama4TextConfig": ({**_EXPERTS, **_HEADS, "intermediate_size_mlp": 160}, "no separate body and head"),
    "CwmConfig": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "by the longest text of a step",
    ),
}
"""What is not, and why."""


@cache
def foreign_model(name: str) -> Path:
    """The folder of a model that is served, made once in this process and removed at its end."""
    folder = home() / name
    make_model(_configuration(name, SERVED[name]), folder, seed=sum(name.encode()))
    return folder


@cache
def refused_model(name: str) -> Path:
    """The folder of a model that is not: its configuration, beside weights of another."""
    folder = home() / f"refused-{name}"
    shutil.copytree(foreign_model("HyperCLOVAXConfig"), folder)
    config = _configuration(name, REFUSED[name][0])
    config.save_pretrained(folder)
    return folder


def _configuration(name: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    config = getattr(transformers, name)(**{**SIZES, **changes})
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config
