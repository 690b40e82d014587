"""An adapter as users of `LLM` name it: vLLM's LoRARequest."""

from __future__ import annotations

from dataclasses import dataclass

LONG_LORA = "must be 0 or absent: adapters that stretch positions are not served, and all have the model's length"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for requests of `LLM`, which loads it when it is named first.

    Attributes:
        lora_name: names it: requests with one name have one adapter.
        lora_int_id: at least 1; taken for users of vLLM. The scheduler numbers adapters itself.
        lora_path: its folder, below `lora_root` or relative to it.
        load_inplace: load it anew, in place of the one that has its name.
        long_lora_max_len: 0 or None; an adapter has the model's length.

    Raises ValueError for an empty name or path, a number below 1, or a length of its own.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    long_lora_max_len: int | None = None

    def __post_init__(self) -> None:
        if not (self.lora_name and self.lora_path):
            raise ValueError("an adapter needs a name and a path")
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, not {self.lora_int_id}")
        if self.long_lora_max_len:
            raise ValueError(f"long_lora_max_len {LONG_LORA}")
