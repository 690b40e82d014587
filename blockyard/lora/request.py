"""An adapter as users of `LLM` name it: vLLM's LoRARequest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for requests of `LLM`, which loads it when it is named first.

    Attributes:
        lora_name: names it: requests with one name have one adapter.
        lora_int_id: at least 1; taken for users of vLLM. The scheduler numbers adapters itself.
        lora_path: its folder, below `lora_root` or relative to it.
        load_inplace: load it anew, in place of the one that has its name.

    Raises ValueError for an empty name or path, or a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not (self.lora_name and self.lora_path):
            raise ValueError("an adapter has a name and a path")
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, not {self.lora_int_id}")
