"""Describes a network: its modules in the order of a step, their layouts and shards, and their tensors by name.

Names are those of transformers' checkpoints. Knows no files, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from blockyard.model_config.decoder_config import NormKind
from worker_service.models.mixers.recurrent import RecurrentMixer
from worker_service.models.mlp.mlp import MLP, MoE
from worker_service.models.projections import ModuleNames, Projection, ProjectionRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blockyard.model_config.names import Names, RecurrentNames
    from blockyard.model_config.share import Share
    from blockyard_kernels.packed import PackedLinear
    from worker_service.models.layers import DecoderLayer, Embedding, LMHead, NormLayer
    from worker_service.models.mixers.attention import AttentionMixer
    from worker_service.models.model_config import ModelConfig
    from worker_service.pooling.head import PoolingHead

NUM_QKV = 3


@dataclass(frozen=True, slots=True)
class Module:
    """One packed weight of a network, and the checkpoint tensors whose rows it holds, one after another."""

    name: str
    """The name within its layer or the network, such as "self_attn.qkv_proj"."""
    kind: str
    weight: Tensor | PackedLinear
    tensors: tuple[ProjectionRows, ...]
    """The part of each tensor that this rank has."""
    layer: int | None = None
    """The index of its layer in the whole network; None if it is outside of the layers."""
    cut: str = ""
    """This rank's shard of the whole weight, in words; empty: the whole weight."""

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(f"{rows.name}.{kind}" for rows in self.tensors for kind in ("weight", "bias"))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields copies of this rank's part of each tensor, on the device, with the values that products use."""
        weight, bias = (self.weight.clone(), None) if isinstance(self.weight, Tensor) else self.weight.unpack()
        sizes = [rows.num_rows for rows in self.tensors]
        for rows, part in zip(self.tensors, weight.split(sizes), strict=True):
            yield f"{rows.name}.weight", rows.restore(part)
        if bias is not None:
            for rows, part in zip(self.tensors, bias.split(sizes), strict=True):
                yield f"{rows.name}.bias", rows.restore(part)

    def describe(self) -> str:
        """Returns a line: shape, layout, cut, bytes."""
        weight = self.weight
        if isinstance(weight, Tensor):
            shape, layout = list(weight.shape), str(weight.dtype).removeprefix("torch.")
        else:
            shape, layout = [sum(rows.num_rows for rows in self.tensors), weight.in_features], weight.layout
        parts = [rows.name.rpartition(".")[2] for rows in self.tensors]
        of = f" of {', '.join(parts)}" if len(parts) > 1 else ""
        cut = f", {self.cut}" if self.cut else ""
        return f"{self.name}: {self.kind} {shape}{of}, {layout}{cut}, {in_words(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class OtherModule:
    """A tensor or weight outside of products, with the fields of `Module`."""

    name: str
    kind: str
    shape: tuple[int, ...]
    layout: str
    layer: int
    cut: str
    num_bytes: int
    tensor_names: frozenset[str]
    named_tensors: Callable[[], Iterator[tuple[str, Tensor]]]

    def describe(self) -> str:
        cut = f", {self.cut}" if self.cut else ""
        return f"{self.name}: {self.kind} {list(self.shape)}, {self.layout}{cut}, {in_words(self.num_bytes)}"


def list_modules(
    config: ModelConfig,
    share: Share,
    names: ModuleNames,
    beginning: Embedding | None,
    layers: Sequence[DecoderLayer],
    ending: LMHead | None,
) -> list[Module | OtherModule]:
    """Lists the modules of a decoder in the order of a step. The arguments are parts of `DecoderModel`."""
    tokens = _part("tokens", share.vocabulary, config.vocab_size) if share.is_cut else ""
    modules = list[Module | OtherModule]()
    if beginning is not None:
        rows = ProjectionRows(names.embedding, config.vocab_size, config.hidden_size, (_slice(share.vocabulary),))
        modules.append(Module(rows.name, "Embedding", beginning.table, (rows,), cut=tokens))
        if beginning.positions is not None:
            modules.append(_whole(names.positions, "Embedding", beginning.positions))
        if beginning.token_types is not None:
            modules.append(_whole(names.token_types, "Embedding", beginning.token_types))
        if beginning.norm is not None:
            modules += _norm(names.embedding_norm, beginning.norm)
    for layer in layers:
        modules += _layer_modules(config, share, names, layer)
    if ending is not None:
        modules += _norm(names.final_norm, ending.norm) if ending.norm else ()
        # A table that serves as embedding and as head is listed once.
        if ending.head is not None and (beginning is None or ending.head is not beginning.table):
            rows = ProjectionRows(names.head, config.vocab_size, config.hidden_size, (_slice(share.vocabulary),))
            modules.append(Module(names.head, "Linear", ending.head, (rows,), cut=tokens))
        if ending.pooling is not None:
            modules += _pooling_modules(config, names, ending.pooling, beginning)
    return modules


def _pooling_modules(
    config: ModelConfig, names: ModuleNames, head: PoolingHead, beginning: Embedding | None
) -> Iterator[Module]:
    if head.table is not None and (beginning is None or head.table is not beginning.table):
        yield _whole(names.head, "Linear", head.table)
    for dense, product in zip(head.rule.products, head.products, strict=True):
        yield Module(
            dense.name, "Linear", product, (ProjectionRows(dense.name, dense.out_features, dense.in_features),)
        )
    for dense, weight in zip(head.rule.products, head.norms, strict=True):
        if weight is not None:
            yield _whole(dense.norm, "LayerNorm", weight)


def _layer_modules(
    config: ModelConfig, share: Share, names: ModuleNames, layer: DecoderLayer
) -> Iterator[Module | OtherModule]:
    index = share.layers.start + layer.index
    prefix, within_layer = names.layer(index), config.names
    heads, features = "", ""
    if share.is_cut:
        heads = _part("heads", share.heads, config.num_heads)
        inner = layer.config.feed.inner_features if layer.config.feed is not None else 0
        features = _part("inner features", share.part(inner), inner)
    key_heads = f", {_part('KV heads', share.kv_heads, config.num_kv_heads)}" if heads else ""

    def linear(projection: Projection, cut: str) -> Module:
        within = [module.name.removeprefix(prefix) for module in projection.modules]
        name = within[0]
        if len(within) > 1:
            scope = name.rpartition(".")[0]
            joined = "qkv_proj" if len(within) == NUM_QKV else "gate_up_proj"
            name = f"{scope}.{joined}" if scope else joined
        return Module(name, "Linear", projection.packed, projection.modules, index, cut)

    norms = dict(layer.norms)
    for name in ("pre_attention", "post_attention", "pre_feed", "post_feed"):
        match name:
            case "post_attention":
                if isinstance(layer.mixer, RecurrentMixer):
                    yield from _recurrent_modules(layer.mixer, linear, prefix, within_layer.recurrent, index)
                elif layer.mixer is not None:
                    yield from _attention_modules(layer.mixer, linear, prefix, within_layer, index, heads, key_heads)
            case "post_feed":
                if isinstance(layer.feed, MLP):
                    yield linear(layer.feed.gate_up, features)
                    yield linear(layer.feed.down, features)
                elif layer.feed is not None:
                    yield from _mixture_modules(layer.feed, linear, prefix, index, features)
            case _:
                pass
        if name in norms:
            yield from _norm(prefix + getattr(within_layer, name), norms[name], getattr(within_layer, name), index)


def _attention_modules(
    mixer: AttentionMixer, linear: Callable[[Projection, str], Module], prefix: str, names: Names, layer: int, *cut: str
) -> Iterator[Module | OtherModule]:
    """`cut`: this rank's heads, and its KV heads, in words."""
    yield linear(mixer.qkv, "".join(cut))
    if mixer.norms is not None:
        for name, weight in ((names.query_norm, mixer.norms.query), (names.key_norm, mixer.norms.key)):
            yield _whole(prefix + name, "RMSNorm", weight, name, layer)
    if mixer.sinks is not None:
        yield _other(prefix, names.sinks, "Sinks", mixer.sinks, layer, cut[0])
    yield linear(mixer.output, cut[0])


def _recurrent_modules(
    mixer: RecurrentMixer,
    linear: Callable[[Projection, str], Module],
    prefix: str,
    names: RecurrentNames,
    layer: int,
) -> Iterator[Module | OtherModule]:
    weights = mixer.weights
    yield linear(mixer.inputs, "")
    yield _other(prefix, f"{names.conv}.weight", "Convolution", weights.conv[:, None], layer)
    for name, kind, tensor in (
        (f"{names.conv}.bias", "Bias", weights.conv_bias),
        (names.decay_log, "Rates of decay", weights.decay_log),
        (names.step_bias, "Bias", weights.step_bias),
        (names.skip, "Skip factors", weights.skip),
        (f"{names.norm}.weight", "RMSNorm", weights.norm),
    ):
        if tensor is not None:
            yield _other(prefix, name, kind, tensor, layer)
    yield linear(mixer.output, "")


def _other(prefix: str, name: str, kind: str, tensor: Tensor, layer: int, cut: str = "") -> OtherModule:
    full_name, dtype = prefix + name, str(tensor.dtype).removeprefix("torch.")
    return OtherModule(
        name.removesuffix(".weight"),
        kind,
        tuple(tensor.shape),
        dtype,
        layer,
        cut,
        tensor.nbytes,
        frozenset({full_name}),
        lambda: iter([(full_name, tensor.clone())]),
    )


def _mixture_modules(
    feed: MoE, linear: Callable[[Projection, str], Module], prefix: str, layer: int, cut: str
) -> Iterator[Module | OtherModule]:
    """`cut`: this rank's inner features of the experts, in words."""
    yield linear(feed.router, "")
    if feed.routing.choice_bias is not None:
        yield _other(prefix, feed.stored.names.choice_bias, "Bias", feed.routing.choice_bias, layer)
    yield _experts(feed, layer, cut)
    if feed.shared is not None:
        yield linear(feed.shared.gate_up, "")
        yield linear(feed.shared.down, "")
    if feed.shared_gate is not None:
        yield linear(feed.shared_gate, "")


def _experts(feed: MoE, layer: int, cut: str) -> OtherModule:
    linears, tensors = feed.experts.linears, feed.stored
    return OtherModule(
        tensors.module,
        "Experts",
        (feed.experts.shape.num_experts, linears[0].out_features, linears[0].in_features),
        linears[0].layout,
        layer,
        cut,
        sum(linear.num_bytes for linear in linears),
        tensors.tensor_names,
        lambda: tensors.restore(linears),
    )


def _norm(full_name: str, norm: NormLayer, name: str | None = None, layer: int | None = None) -> Iterator[Module]:
    kind = "RMSNorm" if norm.kind is NormKind.RMS else "LayerNorm"
    for tensor in norm.tensors:
        yield _whole(full_name, kind, tensor, name, layer)


def _whole(full_name: str, kind: str, tensor: Tensor, name: str | None = None, layer: int | None = None) -> Module:
    return Module(name or full_name, kind, tensor, (ProjectionRows(full_name, len(tensor), 1),), layer)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _part(what: str, units: range, count: int) -> str:
    return f"{what} {units.start}–{units.stop - 1} of {count}" if units else f"no {what} of {count}"


def describe_modules(title: str, modules: Iterable[Module | OtherModule]) -> str:
    """Returns lines for people: a title with all bytes, then a line per module; equal neighbouring layers share one."""
    modules = list(modules)
    lines = [f"{title}, {in_words(sum(module.num_bytes for module in modules))}"]
    # The lines of each layer, and each module outside of layers by itself.
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
    """Returns a size in words, in the largest unit in which it is at least 1."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"
