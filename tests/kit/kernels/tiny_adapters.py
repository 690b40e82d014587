"""Tiny random adapters of tiny models, made by fixed seeds, as PEFT writes them, and a model with one applied."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from blockyard.model_config.fields import read_object
from tests.kit.waiting import until
from worker_service.lora.reader import AdapterReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import transformers

    from worker_service.lora.adapter import AdapterWeights, LoraRequest

MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
ALL = tuple(MODULES)


def make_tiny_adapter(
    folder: Path, model: Path, seed: int, *, rank: int = 4, targets: tuple[str, ...] = ALL, **fields: Any
) -> Path:
    """Writes an adapter of a model into a folder, and returns it; its products are as large as the model's own.

    Args:
        folder: made if need be.
        model: the folder of the model.
        seed: of its numbers.
        rank: of all its modules.
        targets: the modules that it changes, in every layer.
        fields: of adapter_config.json, beyond or in place of the usual ones.
    """
    shapes = _shapes(model)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(read_object(model / "config.json")["num_hidden_layers"]):
        for target in targets:
            out_features, in_features = shapes[target]
            name = f"base_model.model.model.layers.{layer}.{MODULES[target]}"
            inner = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
            outer = torch.randn(out_features, rank, generator=generator) * 0.2 * rank**-0.5
            tensors |= {f"{name}.lora_A.weight": inner, f"{name}.lora_B.weight": outer}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": list(targets),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_tiny_prompt(folder: Path, model: Path, seed: int, *, num_tokens: int = 6, **fields: Any) -> Path:
    """Writes a soft prompt for a model into a folder, and returns it; its rows are as large as its embeddings.

    Args:
        folder: made if need be.
        model: the folder of the model.
        seed: of its numbers.
        num_tokens: rows.
        fields: of adapter_config.json, beyond or in place of the usual ones.
    """
    width = read_object(model / "config.json")["hidden_size"]
    rows = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))
    config = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": num_tokens,
        "token_dim": width,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    return folder


def read_prompt(folder: Path) -> torch.Tensor:
    """Returns the rows of a soft prompt; none of a LoRA adapter."""
    return load_file(folder / "adapter_model.safetensors").get("prompt_embeddings", torch.zeros(0, 0))


def _shapes(model: Path) -> dict[str, tuple[int, int]]:
    config = read_object(model / "config.json")
    hidden, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // num_heads
    heads, kv_heads = num_heads * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def apply_adapter(network: transformers.PreTrainedModel, folder: Path) -> None:
    """Has a network of transformers compute with an adapter, as PEFT does: `W x + scale * (B (A x))`, in its dtype."""
    config = read_object(folder / "adapter_config.json")
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            inner, outer = (tensors[f"{module}.lora_{factor}.weight"].to(network.dtype) for factor in "AB")

            def add(_: Any, inputs: Any, result: torch.Tensor, inner: Any = inner, outer: Any = outer) -> torch.Tensor:
                return result + (inputs[0] @ inner.T) @ outer.T * scale

            network.get_submodule(module.removeprefix("base_model.model.")).register_forward_hook(add)


class HeldAdapter:
    """Holds workers of this process as they read one adapter, as a slow file system would, until it is let go.

    Use as a context manager: leaving it lets go, since a worker that waits does not end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._begun, self._let_go = threading.Event(), threading.Event()
        self._patch = mock.patch.object(AdapterReader, "read", self._read_late(AdapterReader.read))

    def _read_late(self, read: Callable[..., AdapterWeights]) -> Callable[..., AdapterWeights]:
        def read_late(reader: AdapterReader, request: LoraRequest, folder: Path, *others: Any) -> AdapterWeights:
            if folder == self._folder:
                self._begun.set()
                self._let_go.wait()
            return read(reader, request, folder, *others)

        return read_late

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go.set()
        self._patch.stop()

    async def wait_until_read(self) -> None:
        """Waits until a worker has begun to read it."""
        await until(self._begun.is_set)

    def let_go(self) -> None:
        """Lets the worker read on, to the end."""
        self._let_go.set()
