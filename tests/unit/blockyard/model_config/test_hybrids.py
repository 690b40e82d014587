"""Networks with recurrences: what config.json may ask of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.errors import BlockyardError
from blockyard.model_config.network import read_network

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN = {**SIZES, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 32}
LFM2 = {**SIZES, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "full_attn_idxs": [1]}


@pytest.mark.parametrize(("fields", "name"), [(QWEN, "linear_conv_kernel_dim"), (LFM2, "conv_L_cache")])
def test_a_convolution_wider_than_the_kernels_hold_is_refused(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    for width in (8, 9):
        (tmp_path / "config.json").write_text(json.dumps({**fields, name: width}))
        if width == 8:
            recurrent = read_network(tmp_path).recurrent
            assert recurrent is not None
            assert recurrent.conv_width == width
            continue
        with pytest.raises(BlockyardError, match=f"{name} is 9, more than 8"):
            read_network(tmp_path)
