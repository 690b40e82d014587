"""Describes a network: its modules in the order of a step, how they are held and cut, and their tensors by name.

Names are those of a checkpoint as transformers writes it. Knows no files, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blockyard.model_config.share import Share
    from kernels.ops import PackedLinear
    from worker_service.models.layers import DecoderLayer
    from worker_service.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Module:
    """One weight of a network, with the tensors of a checkpoint that it is made of: one after another, by rows."""

    name: str
    """Within its layer, or the network: "self_attn.qkv_proj"."""
    kind: str
    weight: Tensor | PackedLinear
    tensors: tuple[tuple[str, int], ...]
    """The name of each tensor without ".weight", and its rows that this rank has."""
    layer: int | None = None
    """Counted from the network's first; None: in none."""
    cut: str = ""
    """What part of the whole this rank has, in words; empty: all."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields copies of the tensors, on the device: this rank's part of each, as rows are multiplied by it."""
        weight, bias = (self.weight.clone(), None) if isinstance(self.weight, Tensor) else self.weight.unpack()
        sizes = [size for _, size in self.tensors]
        for (name, _), part in zip(self.tensors, weight.split(sizes), strict=True):
            yield f"{name}.weight", part
        if bias is not None:
            for (name, _), part in zip(self.tensors, bias.split(sizes), strict=True):
                yield f"{name}.bias", part

    def describe(self) -> str:
        """Returns a line: shape, layout, cut, bytes."""
        weight = self.weight
        if isinstance(weight, Tensor):
            shape, layout = list(weight.shape), str(weight.dtype).removeprefix("torch.")
        else:
            shape, layout = [sum(rows for _, rows in self.tensors), weight.in_features], weight.layout
        parts = [name.rpartition(".")[2] for name, _ in self.tensors]
        of = f" of {', '.join(parts)}" if len(parts) > 1 else ""
        cut = f", {self.cut}" if self.cut else ""
        return f"{self.name}: {self.kind} {shape}{of}, {layout}{cut}, {in_words(self.num_bytes)}"


def list_modules(
    config: ModelConfig,
    share: Share,
    embedding: Tensor | PackedLinear | None,
    layers: Sequence[DecoderLayer],
    ending: tuple[Tensor, PackedLinear] | None,
) -> list[Module]:
    """Lists the modules of a decoder in the order of a step; arguments as `DecoderModel` has them."""
    tokens = _part("tokens", share.vocabulary, config.vocab_size) if share.is_cut else ""
    size, modules = len(share.vocabulary), list[Module]()
    if embedding is not None:
        name = "model.embed_tokens"
        modules.append(Module(name, "Embedding", embedding, ((name, size),), cut=tokens))
    for layer in layers:
        modules += _layer_modules(config, share, layer)
    if ending is not None:
        norm, head = ending
        modules.append(_norm("model.norm", norm))
        # A table that is used at both ends is one tensor.
        if head is not embedding:
            modules.append(Module("lm_head", "Linear", head, (("lm_head", size),), cut=tokens))
    return modules


def _layer_modules(config: ModelConfig, share: Share, layer: DecoderLayer) -> Iterator[Module]:
    index, dim = share.layers.start + layer.index, config.head_dim
    prefix = f"model.layers.{index}."
    heads, features = "", ""
    if share.is_cut:
        heads = _part("heads", share.heads, config.num_heads)
        features = _part("inner features", share.mlp, config.intermediate_size)
    key_heads = f", {_part('KV heads', share.kv_heads, config.num_kv_heads)}" if heads else ""

    def linear(name: str, weight: PackedLinear, parts: dict[str, int], cut: str) -> Module:
        scope = name.rpartition(".")[0]
        tensors = tuple((f"{prefix}{scope}.{part}", rows) for part, rows in parts.items())
        return Module(name, "Linear", weight, tensors, index, cut)

    query, key, inner = len(share.heads) * dim, len(share.kv_heads) * dim, len(share.mlp)
    yield _norm("input_layernorm", layer.input_norm, prefix, index)
    projections = {"q_proj": query, "k_proj": key, "v_proj": key}
    yield linear("self_attn.qkv_proj", layer.qkv, projections, heads + key_heads)
    if layer.qk_norms is not None:
        for name, norm in zip(("q_norm", "k_norm"), layer.qk_norms[:2], strict=True):
            yield _norm(f"self_attn.{name}", norm, prefix, index)
    yield linear("self_attn.o_proj", layer.output, {"o_proj": config.hidden_size}, heads)
    yield _norm("post_attention_layernorm", layer.post_attention_norm, prefix, index)
    yield linear("mlp.gate_up_proj", layer.gate_up, {"gate_proj": inner, "up_proj": inner}, features)
    yield linear("mlp.down_proj", layer.down, {"down_proj": config.hidden_size}, features)


def _norm(name: str, weight: Tensor, prefix: str = "", layer: int | None = None) -> Module:
    return Module(name, "RMSNorm", weight, ((prefix + name, len(weight)),), layer)


def _part(what: str, units: range, count: int) -> str:
    return f"{what} {units.start}–{units.stop - 1} of {count}" if units else f"no {what} of {count}"


def describe_modules(title: str, modules: Iterable[Module]) -> str:
    """Returns lines for people: the title with all bytes, then a module each; equal neighbouring layers are one."""
    modules = list(modules)
    lines = [f"{title}, {in_words(sum(module.num_bytes for module in modules))}"]
    # Each layer with its lines, and what is in none by itself.
    parts: list[tuple[int | None, list[str]]] = []
    for layer, members in groupby(modules, lambda module: module.layer):
        described = [module.describe() for module in members]
        parts += [(layer, described)] if layer is not None else [(None, [line]) for line in described]
    for (described, is_layer), equal in groupby(parts, lambda part: (part[1], part[0] is not None)):
        if not is_layer:
            lines += [f"  {line}" for line in described]
            continue
        numbers = [number for number, _ in equal]
        named = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}–{numbers[-1]}"
        lines += [f"  {named}:", *(f"    {line}" for line in described)]
    return "\n".join(lines)


def in_words(num_bytes: float) -> str:
    """Returns a size in the largest unit that it has one of."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"
