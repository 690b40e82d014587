"""A model family: its config.json reader, and the names of its tensors and fields."""

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
    """The `model_type` of the architecture, by which transformers builds the network."""
    read: Callable[[Fields], DecoderConfig]
    """Reads config.json except architecture and dtype; adds violations to the fields."""
    names: Names = LLAMA_NAMES
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps the usual names of fields to those in this family's config.json, if they differ."""
    unpacked: str = ""
    """The `quant_method` whose weights are dequantized when they are loaded; empty: none."""
    texts: Mapping[str, Callable[[Fields], DecoderConfig]] = field(default_factory=dict[str, Any])
    """Readers of the text model in a multimodal config.json, by the `model_type` in its `text_config`;
    `read` is used if it names none. Empty: config.json describes one model."""
    is_tied: bool = False
    """For several models: whether embedding and head share a table if the file does not say."""
