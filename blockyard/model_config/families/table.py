"""The table of all families, and the search for an architecture's family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.families import (
    cohere,
    encoders,
    gemma,
    gpt,
    granite,
    llama,
    mixtures,
    multimodal,
    olmo,
    relatives,
)

if TYPE_CHECKING:
    from blockyard.model_config.families.family import Family

# Suffixes of architectures without a head that generates tokens.
_OTHER_BODIES = ("ForSequenceClassification", "ForMaskedLM", "Model")
_STEMS = ("ForCausalLM", "LMHeadModel")

MODULES = (llama, gemma, granite, relatives, olmo, cohere, gpt, mixtures, multimodal)
FAMILIES: dict[str, Family] = {name: family for module in MODULES for name, family in module.FAMILIES.items()}


def find_family(architecture: str) -> Family | None:
    """Returns the family of an architecture, also of one without a head or with another head; None: not supported."""
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    stem = next((architecture.removesuffix(body) for body in _OTHER_BODIES if architecture.endswith(body)), "")
    decoders = (FAMILIES.get(stem + suffix) for suffix in _STEMS)
    return encoders.FAMILIES.get(f"{stem}Model") or next(filter(None, decoders), None)
