"""The settings of adapters, LoRA and soft prompts. Read by the scheduler, which passes them on to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS
from blockyard.settings import option


def _check_modules(text: str) -> str:
    wrong = [each for each in split_modules(text) if not all(each)]
    if wrong:
        raise ValueError(
            "give name=folder for each adapter, with commas between: sql=/adapters/sql,chat=/adapters/chat"
        )
    return text


def split_modules(text: str) -> list[tuple[str, str]]:
    entries = [each.strip().partition("=") for each in text.split(",") if each.strip()]
    return [(name.strip(), folder.strip()) for name, _, folder in entries]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of adapters. Read by the scheduler, which passes them on to the workers."""

    max_loras: Annotated[int, Field(ge=0, le=256)] = option(
        0, "adapters that sequences of one step may have together: slots on the device; 0: no adapters"
    )
    max_lora_rank: Annotated[int, Field(ge=0, le=512)] = option(
        16, "the largest rank that a LoRA adapter may have; 0: soft prompts alone"
    )
    max_prompt_adapter_tokens: Annotated[int, Field(ge=0, le=MAX_VIRTUAL_TOKENS)] = option(
        0, "the most virtual tokens that a soft prompt may have; 0: no soft prompts"
    )
    max_cpu_loras: Annotated[int, Field(ge=0)] = option(
        0, "adapters that a worker keeps in the host's memory, from which they come into slots; 0: four times max-loras"
    )
    lora_modules: Annotated[str, AfterValidator(_check_modules)] = option(
        "", "adapters to load at the start: name=folder, with commas between"
    )
    lora_root: str = option(
        "",
        "folder of the workers' machines that all adapters are below, and that their folders are relative to; the "
        "workers check it by --worker-lora-root; empty: folders go to the workers as they are",
    )
    lora_patience_seconds: Annotated[float, Field(ge=0)] = option(
        2.0, "how long an adapter waits for a slot while others begin; then one in a slot gets no more sequences"
    )
