"""Builds a decoder from tensors by name: reads, cuts and packs a rank's share of them, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.pooling import PoolingKind
from blockyard.model_config.decoder_config import Experts, is_widely_served, norms_of
from blockyard.model_config.fields import unusable
from blockyard.model_config.names import RowOrder
from blockyard.model_config.parallel_sizes import down_leaves
from blockyard.model_config.recurrent import Recurrent
from blockyard.model_config.share import Share
from blockyard_kernels.mixture.ops import ExpertShape, Router
from blockyard_kernels.select import make_arena
from blockyard_kernels.shapes import Activation, LinearSpec, LogitTransform, QueryKeyNorms
from worker_service.models.decoder import DecoderModel
from worker_service.models.layers import DecoderLayer, Embedding, LMHead, NormLayer, Norms
from worker_service.models.mixers.attention import AttentionMixer
from worker_service.models.mixers.recurrent_reading import RecurrentReader
from worker_service.models.mlp.mlp import MLP, Feed, MoE
from worker_service.models.mlp.tensors import ExpertTensors
from worker_service.models.packed_files import PackedWeights
from worker_service.models.projections import (
    WHOLE,
    Cut,
    Projection,
    ProjectionRows,
    halves_order,
    parts_order,
    stacked_parts,
)
from worker_service.pooling.head import PoolingHead, read_products

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard.model_config.decoder_config import Attention, Mlp
    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear
    from worker_service.models.mixers import Mixer
    from worker_service.models.model_config import ModelConfig
    from worker_service.models.weight_files import Weights


def build_decoder(
    config: ModelConfig, backend: Backend, files: Weights, parallel: Parallel = ALONE, arena: Arena | None = None
) -> DecoderModel:
    """Reads and packs a rank's share of the weights, one tensor at a time, in an order that follows from `config`.

    `arena`: the arena for the weights; None: a new one.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the files do not match the configuration.
    """
    if not backend.is_complete and not is_widely_served(config):
        name = f"--{'cpu' if backend.device.type == 'cpu' else 'gpu'}-kernels"
        raise unusable(
            f"the {backend.name} kernels lack operations that {config.architecture} needs: use {name} reference"
        )
    arena = make_arena(backend.device) if arena is None else arena
    if isinstance(files, PackedWeights):
        arena = files.fill(arena)
    return NetworkBuilder(config, backend, files, Share.of(config, parallel), arena).build()


class NetworkBuilder(RecurrentReader):
    """Reads all tensors of a network and builds it."""

    def build(self) -> DecoderModel:
        beginning, layers, ending = self.read()
        model = DecoderModel(self._config, self._backend, beginning, layers, ending, self._share, self._names)
        model.has_two_tables = self._has_found_two
        return model

    def read(self) -> tuple[Embedding | None, list[DecoderLayer], LMHead | None]:
        """Reads all tensors in the order in which they are packed."""
        config, share, names = self._config, self._share, self._names
        # The largest tensors come first, while there is still memory for the pages of their files.
        beginning, head = self._ends()
        layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            self._passes_over = index not in share.layers
            layer = self._layer(index)
            layers += [] if self._passes_over else [layer]
        self._passes_over = not share.is_last_stage
        final_norm = config.final_norm and self._norm(names.final_norm, config.final_norm, config.hidden_size)
        pooling = self._pooling_head(beginning) if config.pooling is not None else None
        has_end = share.is_last_stage and (head is not None or pooling is not None)
        ending = LMHead(final_norm, head, pooling) if has_end else None
        return beginning, layers, ending

    def _ends(self) -> tuple[Embedding | None, PackedLinear | None]:
        """Reads the embedding and the head; some networks share one table for both."""
        config, share, names = self._config, self._share, self._names
        if config.pooling is not None:
            table = self._keep(self._read(names.embedding + ".weight", config.vocab_size, config.hidden_size))
            return Embedding(table, self._positions(), *self._token_types()), None
        shape, tokens = (config.vocab_size, config.hidden_size), ((_slice(share.vocabulary),),)
        logits = LogitTransform(config.head.scale, config.head.softcap)
        if not config.head.is_tied or self._has_two_tables(shape):
            self._passes_over = not share.is_first_stage
            table: Tensor | PackedLinear = self._keep(self._read(names.embedding + ".weight", *shape, part=tokens))
            positions = self._positions()
            self._passes_over = not share.is_last_stage
            cut = ProjectionRows(names.head, *shape, tokens[0])
            head = self._linear((cut,), bias=config.head.has_bias, spec=LinearSpec(logits=logits)).packed
        else:
            stored = (f"{names.embedding}.weight", f"{names.head}.weight")
            self._passes_over = not (share.is_first_stage or share.is_last_stage)
            tied = self._read(next((name for name in stored if name in self._files), stored[0]), *shape, part=tokens)
            bias = self._bias((ProjectionRows(names.head, *shape, tokens[0]),)) if config.head.has_bias else None
            head = self._pack([tied], bias, LinearSpec(logits=logits)) if share.is_last_stage else None
            table = head if head is not None and head.is_table else self._keep(tied) if share.is_first_stage else tied
            positions = self._positions()
        beginning = Embedding(table, positions) if share.is_first_stage else None
        return beginning, (head if share.is_last_stage else None)

    def _pooling_head(self, beginning: Embedding | None) -> PoolingHead:
        config, rule = self._config, self._config.pooling
        assert rule is not None and beginning is not None
        if rule.kind is not PoolingKind.LABEL_LOGITS:
            return read_products(rule, self._read, self._pack, self._norm_tensor)
        shape = (config.vocab_size, config.hidden_size)
        owns_table = not config.head.is_tied or self._has_two_tables(shape)
        table = self._keep(self._read(self._names.head + ".weight", *shape)) if owns_table else beginning.table
        logits = LogitTransform(config.head.scale, config.head.softcap)
        return PoolingHead(rule, (), (), cast("Tensor", table), logits, owns_table)

    def _positions(self) -> Tensor | None:
        config = self._config
        if config.learned is None:
            return None
        first, count = config.learned.first_row, config.learned.num_positions
        part = ((slice(first, first + count),),)
        return self._keep(self._read(self._names.positions + ".weight", first + count, config.hidden_size, part=part))

    def _token_types(self) -> tuple[Tensor | None, NormLayer | None]:
        """Reads the parts that only encoders have before their layers: the table of token types, and a norm."""
        encoder, names, hidden = self._config.encoder, self._names, self._config.hidden_size
        if encoder is None:
            return None, None
        types, norm = encoder.num_token_types, encoder.embedding_norm
        table = self._keep(self._read(names.token_types + ".weight", types, hidden)) if types else None
        return table, norm and self._norm(names.embedding_norm, norm, hidden)

    def _has_two_tables(self, shape: tuple[int, int]) -> bool:
        """Returns whether the files have a head that differs from the embedding, although both should be tied.

        Then both tables are used, as in transformers: some models are not tied although their config.json says so.
        """
        names = (f"{self._names.embedding}.weight", f"{self._names.head}.weight")
        if not all(name in self._files for name in names):
            return False
        embedding, head = (self._files.read(name, shape) for name in names)
        # A saved model, a model on the meta device and a sharded model have a tied table only once.
        is_saved = embedding.is_meta or tuple(embedding.shape) != shape
        self._has_found_two = is_saved or not torch.equal(embedding, head)
        return self._has_found_two

    def _layer(self, index: int) -> DecoderLayer:
        layer, hidden = self._config.layers[index], self._config.hidden_size
        prefix, names = self._names.layer(index), self._config.names
        return DecoderLayer(
            index=index - self._share.layers.start,
            config=layer,
            norms=Norms(
                **{which: self._norm(prefix + getattr(names, which), layer.norm, hidden) for which in norms_of(layer)}
            ),
            mixer=None if layer.mixer is None else self._mixer(prefix, layer.mixer),
            feed=None if layer.feed is None else self._feed(prefix, layer.feed),
        )

    def _mixer(self, prefix: str, mixer: Attention | Recurrent) -> Mixer:
        if isinstance(mixer, Recurrent):
            return self._recurrent(prefix, mixer)
        return self._attention(prefix, mixer)

    def _attention(self, prefix: str, attention: Attention) -> AttentionMixer:
        query, output = self._cuts(attention)[0], prefix + self._config.names.output
        return AttentionMixer(
            config=attention,
            qkv=self._linear(self._qkv(prefix, attention), bias=attention.qkv_bias),
            norms=self._qk_norms(prefix, attention),
            output=self._row_parallel(output, query, self._share.output_leaves, bias=attention.output_bias),
            sinks=self._sinks(prefix, attention) if attention.has_sinks else None,
        )

    def _feed(self, prefix: str, feed: Mlp | Experts) -> Feed:
        names = self._config.names
        if isinstance(feed, Experts):
            return self._mixture(prefix, feed)
        return self._mlp(prefix, feed, (names.gate, names.up, names.down))

    def _inner(self, feed: Mlp | Experts) -> tuple[Cut, int]:
        """Returns this rank's inner features of an MLP or an expert, and its leaves of the last product."""
        leaves = down_leaves(self._config, feed.inner_features) // self._share.tensor_parallel_size
        return Cut(feed.inner_features, self._share.part(feed.inner_features)), leaves

    def _mlp(self, prefix: str, feed: Mlp, names: tuple[str, str, str]) -> MLP:
        """`names`: of gate, up and down."""
        (inner, leaves), (gate, up, down) = self._inner(feed), names
        gates = ((gate, inner),) if feed.is_gated else ()
        gate_up = self._linear(
            self._columns(prefix, (*gates, (up, inner))),
            bias=feed.has_bias,
            spec=LinearSpec(gated=feed.is_gated, activation=Activation(feed.activation.value)),
        )
        return MLP(gate_up, self._row_parallel(prefix + down, inner, leaves, bias=feed.has_bias))

    def _mixture(self, prefix: str, feed: Experts) -> MoE:
        (inner, leaves), hidden, names = self._inner(feed), self._config.hidden_size, self._config.names.experts
        other = self._config.names.other_experts
        if other is not None and prefix + other.gate in self._files:
            names = other
        module = ProjectionRows(prefix + names.router, feed.num_experts, hidden)
        weight = self._weight(module)
        router = self._pack_router(weight, self._bias((module,)) if feed.router.has_bias else None)
        tensors = ExpertTensors(prefix, names, feed, hidden, inner)
        shape = ExpertShape(
            feed.num_experts,
            Activation(feed.activation.value),
            feed.limit,
            leaves=leaves,
            partial=self._share.is_cut,
        )
        experts = self._pack_experts(tensors.read(self._read, self._files.__contains__), shape)
        bias = None
        if feed.router.has_choice_bias:
            bias = self._keep(self._read(prefix + names.choice_bias, feed.num_experts, dtype=torch.float32))
        told = feed.router
        routing = Router(told.top_k, told.renormalises, told.scale, told.is_sigmoid, bias)
        shared = None if feed.shared is None else self._mlp(prefix, feed.shared, names.shared)
        gate = (self._rows(prefix + names.shared_gate, 1, WHOLE),)
        shared_gate = self._linear(gate, bias=False) if feed.gates_shared else None
        return MoE(Projection(router, (module,)), routing, experts, tensors, shared, shared_gate)

    def _sinks(self, prefix: str, attention: Attention) -> Tensor:
        part = ((_slice(self._share.heads),),)
        sinks = self._read(prefix + self._config.names.sinks, attention.num_heads, part=part)
        return self._keep(sinks.float())

    def _cuts(self, attention: Attention) -> tuple[Cut, Cut]:
        """Cuts a layer's queries, and its keys or values."""
        query = Cut(attention.num_heads, self._share.heads, attention.head_dim)
        return query, Cut(attention.num_kv_heads, self._share.kv_heads, attention.head_dim)

    def _qkv(self, prefix: str, attention: Attention) -> tuple[ProjectionRows, ...]:
        config, names = self._config, self._config.names
        query, key = self._cuts(attention)
        modules = ((names.query, query), (names.key, key), (names.value, key))
        if attention.gates_output:
            cut = Cut(attention.num_heads, self._share.heads, 2 * attention.head_dim)
            order = parts_order((attention.head_dim,) * 2, len(cut.units))
            gated = self._rows(prefix + names.query, cut.size, (cut.part,), order=order)
            return (gated, *self._columns(prefix, modules[1:]))
        if names.row_order is RowOrder.HEADS_INTERLEAVED:
            cut = Cut(attention.num_heads, self._share.heads, 3 * attention.head_dim)
            order = parts_order((attention.head_dim,) * 3, len(cut.units))
            return (self._rows(prefix + names.query, cut.size, (cut.part,), order=order),)
        if names.row_order is RowOrder.PLAIN or attention.rotary is None:
            return self._columns(prefix, modules)
        size = config.rotaries[attention.rotary].rotated(attention.head_dim)
        orders = [halves_order(len(cut.units), attention.head_dim, size) for cut in (query, key)]
        return tuple(
            self._rows(prefix + name, cut.size, (cut.part,), order=order)
            for (name, cut), order in zip(modules, [*orders, None], strict=True)
        )

    def _columns(self, prefix: str, modules: Sequence[tuple[str, Cut]]) -> tuple[ProjectionRows, ...]:
        """Cuts modules of the same input by their outputs. Modules with the same name are stored as one tensor."""
        if len({name for name, _ in modules}) == len(modules):
            return tuple(self._rows(prefix + name, cut.size, (cut.part,)) for name, cut in modules)
        cuts = [cut for _, cut in modules]
        return (self._rows(prefix + modules[0][0], sum(cut.size for cut in cuts), stacked_parts(cuts)),)

    def _qk_norms(self, prefix: str, attention: Attention) -> QueryKeyNorms | None:
        names, norm = self._config.names, attention.qk_norm
        if norm is None:
            return None
        widths = (attention.head_dim, attention.head_dim)
        if attention.norms_whole_rows:
            widths = (attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim)
        query, key = (
            self._norm(prefix + name, norm, width)
            for name, width in zip((names.query_norm, names.key_norm), widths, strict=True)
        )
        assert query.weight is not None and key.weight is not None
        return QueryKeyNorms(query.weight, key.weight, norm.epsilon, attention.norms_whole_rows, attention.norms_turned)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)
