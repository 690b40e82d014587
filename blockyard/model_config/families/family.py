"""What a family is: its reader, and what its tensors and fields are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.model_config.names import LLAMA_NAMES, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is read."""

    model_type: str
    """The `model_type` that belongs to it; transformers builds the network by that one."""
    read: Callable[[Fields], DecoderConfig]
    """Reads all of config.json but architecture and dtype, and notes what is wrong."""
    names: Names = LLAMA_NAMES
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """What fields are called in this family's config.json, for those that have names of their own."""
    unpacked: str = ""
    """The `quant_method` of weights that are turned into the model's dtype when they are loaded; empty: none are."""
    text_of: str = ""
    """The field that holds the text model's own fields, in a config.json of several models; empty: it is the file."""
