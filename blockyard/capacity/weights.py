"""Counts a rank's weights in elements and bytes, from a network's sizes and the kernels' weight format.

The worker names and reads the tensors (`worker_service.models.decoder`); a test compares the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.contract.parallel import ALONE
from blockyard.contract.pooling import PoolingKind
from blockyard.model_config.decoder_config import (
    ITEM_BYTES,
    Attention,
    DecoderConfig,
    Experts,
    Norm,
    NormKind,
    norms_of,
)
from blockyard.model_config.fields import unusable
from blockyard.model_config.parallel_sizes import down_leaves
from blockyard.model_config.recurrent import Recurrent
from blockyard.model_config.share import Share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.model_config.decoder_config import Layer, Mlp
    from blockyard.model_config.stored_weights import StoredWeights

BYTE_BITS, WORD_BYTES = 8, 4
# Per group or row of weights that a checkpoint has quantized (the modules `quantized` of `blockyard_kernels`).
SCALE_BYTES, SUM_BYTES, CPU_ZERO_BYTES = 4, 4, 2


@dataclass(frozen=True, slots=True)
class Product:
    """A rank's part of the weight of a linear product."""

    num_rows: int
    """Output features; for a gated weight those of gate and up together."""
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    leaves: int = 1
    is_partial: bool = False
    """Whether other ranks hold the rest of its inner dimension."""
    is_router: bool = False
    """Whether it is a router: never quantized, and held in float32 if torch multiplies it."""
    module: str = ""
    """The name of the first checkpoint module that is fused into it."""
    stored: StoredWeights | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements of the weight and its bias."""
        return self.num_rows * (self.in_features + self.has_bias)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format in which kernels hold the weights of linear products."""

    panel_columns: int = 1
    """Outputs are padded to a multiple of this; gate and up of a gated weight each to half of it."""
    scale_bytes: int = 0
    """Bytes of scales for each output and leaf of a one-byte weight; 0: the weights are not quantized."""
    word_bytes: int = 1
    """Rows of quantized weights are padded to a multiple of this many bytes."""
    keeps_leaves: bool = True
    """Whether each leaf of the inner dimension has its own scales."""
    is_wide: bool = False
    """Whether all weights are held in float32."""
    widens_leaves: bool = False
    """Whether weights with several leaves, or split along the inner dimension, are held in float32."""
    holds_tables: bool = True
    """Whether the embedding can read rows of the head's weight, so that a tied table is held once."""

    @property
    def is_quantized(self) -> bool:
        """Whether weights are quantized to one byte each."""
        return self.scale_bytes > 0

    def held_bytes(self, product: Product, item_bytes: int) -> int:
        """Returns the bytes of a product's weight and bias. `item_bytes`: of the model's dtype."""
        if product.stored is not None:
            return self._stored_bytes(product, product.stored) + product.num_rows * item_bytes * product.has_bias
        is_torchs_router = product.is_router and self.panel_columns == 1
        if self.is_wide or is_torchs_router or (self.widens_leaves and (product.leaves > 1 or product.is_partial)):
            item_bytes = ITEM_BYTES["float32"]
        num_rows = self._num_columns(product)
        bias_bytes = product.num_rows * item_bytes * product.has_bias
        if self.is_quantized and not product.is_router:
            leaves = product.leaves if self.keeps_leaves else 1
            return (
                num_rows * (_up_to_multiple(product.in_features, self.word_bytes) + leaves * self.scale_bytes)
                + bias_bytes
            )
        return num_rows * product.in_features * item_bytes + bias_bytes

    def _num_columns(self, product: Product) -> int:
        sides = 2 if product.is_gated else 1
        return sides * _up_to_multiple(product.num_rows // sides, max(1, self.panel_columns // sides))

    def _stored_bytes(self, product: Product, stored: StoredWeights) -> int:
        """Returns the bytes of a weight that its checkpoint has quantized: in panels, or in the stored layout."""
        width, num_rows, is_given = product.in_features, self._num_columns(product), self.panel_columns == 1
        if stored.bits == BYTE_BITS:
            padded = width if is_given else _up_to_multiple(width, WORD_BYTES)
            return num_rows * (padded + (SCALE_BYTES if is_given else product.leaves * (SCALE_BYTES + SUM_BYTES)))
        row_bytes = width if is_given else width // 2
        zero_bytes = 1 if is_given else CPU_ZERO_BYTES
        order_bytes = (8 if is_given else 4) * width * stored.is_ordered
        groups = width // stored.held_group(width)
        return num_rows * (row_bytes + groups * (SCALE_BYTES + zero_bytes)) + order_bytes


def _up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def layer_products(network: DecoderConfig, share: Share, layer: Layer) -> tuple[Product, ...]:
    """Lists the products of a layer without the experts'."""
    feed, hidden = layer.feed, network.hidden_size
    mixed = mixer_products(network, share, layer.mixer) if layer.mixer is not None else ()
    if feed is None:
        return mixed
    if not isinstance(feed, Experts):
        return *mixed, *feed_products(network, share, feed)
    shared = feed_products(network, share, feed.shared) if feed.shared is not None else ()
    gate = (Product(1, hidden),) if feed.gates_shared else ()
    return *mixed, Product(feed.num_experts, hidden, feed.router.has_bias, is_router=True), *shared, *gate


def mixer_products(network: DecoderConfig, share: Share, mixer: Attention | Recurrent) -> tuple[Product, Product]:
    """Returns the products before and behind a mixer."""
    hidden, names = network.hidden_size, network.names
    if isinstance(mixer, Attention):
        queries, keys = len(share.heads) * mixer.head_dim, len(share.kv_heads) * mixer.head_dim
        num_rows, in_features, leaves = (1 + mixer.gates_output) * queries + 2 * keys, queries, share.output_leaves
        modules, biases = (names.query, names.output), (mixer.qkv_bias, mixer.output_bias)
    else:
        mine = mixer.share(share.tensor_parallel_size)
        num_rows, in_features, leaves = mine.in_features, mine.out_features, share.mixer_leaves
        modules, biases = (names.recurrent.inputs[0], names.recurrent.output), (mixer.in_bias, mixer.out_bias)
    return (
        Product(num_rows, hidden, biases[0], module=modules[0]),
        Product(hidden, in_features, biases[1], leaves=leaves, is_partial=share.is_cut, module=modules[1]),
    )


def feed_products(network: DecoderConfig, share: Share, feed: Mlp | Experts) -> tuple[Product, Product]:
    """Returns both products of an MLP, or of one expert."""
    hidden, inner, names = network.hidden_size, len(share.part(feed.inner_features)), network.names
    leaves = down_leaves(network, feed.inner_features) // share.tensor_parallel_size
    return (
        Product((1 + feed.is_gated) * inner, hidden, feed.has_bias, is_gated=feed.is_gated, module=names.up),
        Product(hidden, inner, feed.has_bias, leaves=leaves, is_partial=share.is_cut, module=names.down),
    )


def _products(network: DecoderConfig, share: Share) -> Iterator[tuple[int, Product]]:
    """Yields the products of a rank, each with how often it occurs."""
    for index in share.layers:
        layer = network.layers[index]
        if isinstance(layer.feed, Experts):
            for product in feed_products(network, share, layer.feed):
                yield layer.feed.num_experts, product
        for product in layer_products(network, share, layer):
            name = network.names.prefixes[0] + network.names.layer.format(index) + product.module
            is_stored = network.stored is not None and network.stored.covers(name)
            yield 1, replace(product, stored=network.stored) if is_stored else product
    if network.pooling is not None:
        for dense in network.pooling.products:
            yield 1, Product(dense.out_features, dense.in_features, dense.has_bias)
    elif share.is_last_stage:
        yield 1, _head(network, share)


def _head(network: DecoderConfig, share: Share) -> Product:
    stored, name = network.stored, network.names.heads[0]
    is_quantized = stored is not None and stored.has_head and stored.covers(name) and not network.head.is_tied
    held = stored if is_quantized else None
    return Product(len(share.vocabulary), network.hidden_size, network.head.has_bias, module=name, stored=held)


def _num_tables(network: DecoderConfig) -> int:
    """Counts the stored vocabulary tables that are not a product's weight too."""
    if network.pooling is None:
        return 0 if network.head.is_tied else 1
    return 2 if network.pooling.kind is PoolingKind.LABEL_LOGITS and not network.head.is_tied else 1


def _norm_elements(network: DecoderConfig, share: Share) -> Iterator[tuple[Norm, int]]:
    """Yields the norms of a rank, each with its weight's number of elements."""
    for layer in (network.layers[index] for index in share.layers):
        for _ in norms_of(layer):
            yield layer.norm, network.hidden_size
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.qk_norm is not None:
            for heads in (mixer.num_heads, mixer.num_kv_heads):
                yield mixer.qk_norm, mixer.head_dim * (heads if mixer.norms_whole_rows else 1)
        if isinstance(mixer, Recurrent) and mixer.num_value_heads:
            yield Norm(), mixer.share(share.tensor_parallel_size).norm_features
    if share.is_last_stage and network.final_norm is not None:
        yield network.final_norm, network.hidden_size
    for dense in network.pooling.products if network.pooling else ():
        if dense.norm:
            yield Norm(NormKind.LAYER), dense.out_features
    if network.encoder is not None and network.encoder.embedding_norm is not None:
        yield network.encoder.embedding_norm, network.hidden_size


def _count_norms(network: DecoderConfig, share: Share) -> int:
    return sum(width * (norm.has_weight + norm.has_bias) for norm, width in _norm_elements(network, share))


def _norm_bytes(network: DecoderConfig, share: Share) -> int:
    wide, item = ITEM_BYTES["float32"], ITEM_BYTES[network.dtype_name]
    return sum(
        width * (norm.has_weight + norm.has_bias) * (wide if norm.is_held_wide else item)
        for norm, width in _norm_elements(network, share)
    )


def _num_choice_biases(network: DecoderConfig, share: Share) -> int:
    feeds = (network.layers[index].feed for index in share.layers)
    return sum(feed.num_experts for feed in feeds if isinstance(feed, Experts) and feed.router.has_choice_bias)


def _num_sinks(network: DecoderConfig, share: Share) -> int:
    mixers = (network.layers[index].mixer for index in share.layers)
    return sum(len(share.heads) for mixer in mixers if isinstance(mixer, Attention) and mixer.has_sinks)


def _convolution_elements(network: DecoderConfig, share: Share) -> int:
    """Counts the elements of the convolutions of a rank's recurrences, biases among them."""
    mixers = (network.layers[index].mixer for index in share.layers)
    return sum(
        mixer.share(share.tensor_parallel_size).conv_features * (mixer.conv_width + mixer.conv_bias)
        for mixer in mixers
        if isinstance(mixer, Recurrent)
    )


def _num_rates(network: DecoderConfig, share: Share) -> int:
    """Counts the float32 numbers of the heads of a rank's recurrences."""
    mixers = (network.layers[index].mixer for index in share.layers)
    return sum(
        mixer.num_rates * len(share.part(mixer.num_value_heads)) for mixer in mixers if isinstance(mixer, Recurrent)
    )


def _num_wide(network: DecoderConfig, share: Share) -> int:
    """Counts the numbers outside of products and norms that are held in float32."""
    return sum(count(network, share) for count in (_num_sinks, _num_rates, _num_choice_biases))


def _num_positions(network: DecoderConfig) -> int:
    """Counts the rows of the tables of positions and of token types."""
    types = network.encoder.num_token_types if network.encoder else 0
    return types + (network.learned.num_positions if network.learned else 0)


def count_elements(network: DecoderConfig) -> int:
    """Counts the elements of all tensors of a network's checkpoint."""
    share = Share.of(network, ALONE)
    table = _num_tables(network) * network.vocab_size * network.hidden_size
    first_row = network.learned.first_row if network.learned else 0
    positions = (_num_positions(network) + first_row) * network.hidden_size
    products = sum(count * product.num_elements for count, product in _products(network, share))
    others = _num_wide(network, share) + _convolution_elements(network, share)
    return table + positions + products + _count_norms(network, share) + others


def weights_bytes(network: DecoderConfig, share: Share, held: WeightFormat) -> int:
    """Counts the bytes of a rank's weights as the kernels hold them: what a worker reports once loaded."""
    item_bytes = ITEM_BYTES[network.dtype_name]
    products = sum(count * held.held_bytes(product, item_bytes) for count, product in _products(network, share))
    is_head = network.pooling is None and network.head.is_tied and share.is_last_stage and held.holds_tables
    num_tables = 1 if network.pooling is None else _num_tables(network)
    rows = num_tables * len(share.vocabulary) * (share.is_first_stage and not is_head)
    rows += _num_positions(network) * share.is_first_stage
    wide = ITEM_BYTES["float32"] * _num_wide(network, share)
    narrow = item_bytes * (rows * network.hidden_size + _convolution_elements(network, share))
    return products + narrow + wide + _norm_bytes(network, share)


def check_room(num_bytes: int, room_bytes: int, held: str, device_type: str) -> None:
    """Refuses weights that do not fit into memory: loading them would kill the process without a message.

    Raises:
        BlockyardError: MODEL_NOT_LOADED.
    """
    if num_bytes > room_bytes:
        raise unusable(
            f"the weights take {num_bytes / 2**30:.1f} GiB in {held}, and {room_bytes / 2**30:.1f} GiB of memory "
            f"are free ({device_type}): take a smaller model, a smaller --dtype, or a larger machine"
        )
