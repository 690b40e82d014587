"""All families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.families import cohere, gemma, gpt, llama, mixtures, olmo, relatives

if TYPE_CHECKING:
    from blockyard.model_config.families.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (llama, gemma, relatives, olmo, cohere, gpt, mixtures)
    for name, family in module.FAMILIES.items()
}
