"""The settings of KV blocks. Read by the scheduler, which passes on to the workers what concerns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class CacheSettings:
    block_size: Annotated[int, Field(ge=0)] = option(0, "tokens of a block; 0: 16 on a GPU, 32 on a CPU")
    num_device_blocks: Annotated[int, Field(ge=0)] = option(0, "device blocks; 0: as many as fit")
    num_host_blocks: Annotated[int, Field(ge=-1)] = option(-1, "host blocks; -1: as many as the swap space holds")
    kv_cache_dtype: str = option(
        "auto",
        "what to hold keys and values in; auto: the model's dtype; int8, on a CPU: half the bytes of bfloat16, for "
        "more and longer sequences, and a little less exact",
        choices=("auto", "bfloat16", "int8"),
    )
    enable_prefix_caching: bool = option(True, "find prompts' blocks again by their content")
    enable_host_prefix_cache: bool = option(True, "let host blocks keep content that device blocks have no room for")
