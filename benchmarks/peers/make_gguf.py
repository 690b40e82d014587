"""Writes a Llama's or Qwen2's folder as a GGUF file, which is what llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

QUANTIZATIONS = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def write_gguf(model: str, target: Path, kind: str) -> Path:
    """Writes the file, unless it is there. `kind`: bfloat16, or int8 for Q8_0."""
    if target.exists():
        return target
    folder = Path(model)
    config = json.loads((folder / "config.json").read_text())
    quantization, file_type = QUANTIZATIONS[kind]
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, config["model_type"])
    add_configuration(writer, config)
    writer.add_file_type(file_type)
    add_vocabulary(writer, folder)
    for name, tensor in tensors(folder, config):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            packed = gguf.quants.quantize(tensor, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def add_configuration(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the sizes."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Adds the pieces and merges of a byte-level BPE."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {each["content"] for each in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in pieces])
    kinds = (gguf.TokenType.CONTROL if piece in special else gguf.TokenType.NORMAL for piece, _ in pieces)
    writer.add_token_types(list(kinds))
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors under the names of GGUF, in float32."""
    architecture = gguf.MODEL_ARCH.LLAMA if config["model_type"] == "llama" else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in read_bfloat16(folder / "model.safetensors"):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        yield new_name, _order_for_rotation(name, tensor, config)


def read_bfloat16(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file, widened to float32: numpy has no bfloat16.

    The format: https://github.com/huggingface/safetensors#format.
    """
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    for name, entry in json.loads(bytes(data[8:start])).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", entry
        begin, end = entry["data_offsets"]
        upper = data[start + begin : start + end].view("<u2").astype(np.uint32) << 16
        yield name, upper.view(np.float32).reshape(entry["shape"])


def _order_for_rotation(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Llama's queries and keys have their halves interleaved there."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = next((count for part, count in heads.items() if part in name), None)
    if found is None or config["model_type"] != "llama":
        return tensor
    halves = tensor.reshape(found, 2, tensor.shape[0] // found // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
