"""Text models inside multimodal checkpoints; vision and audio models are ignored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from blockyard.model_config.families.family import Family
from blockyard.model_config.families.gemma import SANDWICH_NAMES, gemma3
from blockyard.model_config.families.llama import FAMILIES as LLAMA_FAMILIES
from blockyard.model_config.families.llama import Traits, read_llama
from blockyard.model_config.families.relatives import ministral3
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.reading import Windows
from blockyard.model_config.rotary import COMMON_KINDS

# The places of tensors differ by the version of transformers that wrote the checkpoint.
_PLACES = {
    "prefixes": ("model.language_model.", "language_model.model.", "model."),
    "heads": ("lm_head", "language_model.lm_head"),
}
_NAMES = replace(LLAMA_NAMES, **_PLACES)
# Multimodal positions have three parts, which are equal in a text-only prompt.
_KINDS = {**COMMON_KINDS, "mrope": "default"}
_mistral = LLAMA_FAMILIES["MistralForCausalLM"].read
_qwen2_vl = partial(
    read_llama,
    traits=Traits(
        qkv_bias=True,
        windows=Windows.FLAGGED,
        num_kv_heads=8,
        epsilon=1e-5,
        positions={"kinds": _KINDS, "default_theta": 1e6},
    ),
)
_qwen3_vl = partial(
    read_llama,
    traits=Traits(
        reads_attention_bias=True,
        qk_norm=True,
        head_dim=128,
        num_kv_heads=32,
        positions={"kinds": _KINDS, "default_theta": 5e5},
    ),
)


FAMILIES = {
    "Gemma3ForConditionalGeneration": Family(
        "gemma3", gemma3, replace(SANDWICH_NAMES, **_PLACES), texts={"gemma3_text": gemma3}, is_tied=True
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3", _mistral, _NAMES, texts={"mistral": _mistral, "ministral3": ministral3}, is_tied=True
    ),
    "Qwen2VLForConditionalGeneration": Family("qwen2_vl", _qwen2_vl, _NAMES, texts={"qwen2_vl_text": _qwen2_vl}),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", _qwen2_vl, _NAMES, texts={"qwen2_5_vl_text": _qwen2_vl}),
    "Qwen3VLForConditionalGeneration": Family("qwen3_vl", _qwen3_vl, _NAMES, texts={"qwen3_vl_text": _qwen3_vl}),
}
