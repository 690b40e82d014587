"""An adapter for requests of `LLM`: the same as vLLM's LoRARequest."""

from __future__ import annotations

from dataclasses import dataclass

LONG_LORA = "must be 0 or absent: adapters that stretch positions are not served, and all have the model's length"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for requests of `LLM`, which loads it on first use.

    Attributes:
        lora_name: identifies the adapter: requests with the same name use the same adapter.
        lora_int_id: at least 1; accepted for compatibility with vLLM and not used.
        lora_path: the adapter's folder, below `lora_root` or relative to it.
        load_inplace: load the adapter again, replacing a loaded one of the same name.
        long_lora_max_len: must be 0 or None; adapters have the model's maximum length.

    Raises ValueError for an empty name or path, a `lora_int_id` below 1, or a `long_lora_max_len`.
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
