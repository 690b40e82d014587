"""What a family is: its reader, and what its tensors and fields are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.model_config.names import LLAMA_NAMES, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    """The `model_type` that belongs to it; transformers builds the network by that one."""
    read: Callable[[Fields], DecoderConfig]
    """Reads all of config.json but architecture and dtype, and notes what is wrong."""
    names: Names = LLAMA_NAMES
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """What fields are called in this family's config.json, for those that have names of their own."""
    unpacked: str = ""
    """The `quant_method` of weights that are turned into the model's dtype when they are loaded; empty: none are."""
    texts: Mapping[str, Callable[[Fields], DecoderConfig]] = field(default_factory=dict[str, Any])
    """Of several models in one config.json, the text model's fields in `text_config`: that one's readers by its
    `model_type`; `read`: where it names none. Empty: the file is of one model."""
    is_tied: bool = False
    """Of several models: whether embedding and head are one table, where the file does not say."""
