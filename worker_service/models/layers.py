"""One decoder layer in terms of the op set: a mixer, an MLP or experts, and norms before or after them.

Every product goes through the backend; nothing here multiplies matrices itself. Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from blockyard.model_config.decoder_config import Layer, NormKind, Placement
from blockyard.model_config.parallel_sizes import vocabulary_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from blockyard_kernels.collectives import Collectives
    from blockyard_kernels.ops import Backend, PackedLinear
    from worker_service.models.mixers import Mixer
    from worker_service.models.mlp.mlp import Feed
    from worker_service.models.projections import Projection
    from worker_service.models.step_context import StepContext
    from worker_service.pooling.head import PoolingHead


NORM_NAMES = ("pre_attention", "post_attention", "pre_feed", "post_feed")


@dataclass(frozen=True, slots=True, eq=False)
class NormLayer:
    kind: NormKind
    epsilon: float
    weight: Tensor | None
    bias: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.weight, self.bias) if tensor is not None)

    def apply(
        self, backend: Backend, hidden: Tensor, residual: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Adds the residual and normalises: see `Backend.rms_norm`."""
        if self.kind is NormKind.RMS:
            return backend.rms_norm(hidden, self.weight, self.epsilon, residual, scale)
        return backend.layer_norm(hidden, self.weight, self.bias, self.epsilon, residual, scale)


@dataclass(frozen=True, slots=True, eq=False)
class Norms:
    """The norms of a layer; None where the layer has none."""

    pre_attention: NormLayer | None = None
    post_attention: NormLayer | None = None
    pre_feed: NormLayer | None = None
    post_feed: NormLayer | None = None

    def __iter__(self) -> Iterator[tuple[str, NormLayer]]:
        for name in NORM_NAMES:
            if (norm := getattr(self, name)) is not None:
                yield name, norm


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer, and its index among this rank's layers."""

    index: int
    config: Layer
    norms: Norms
    mixer: Mixer | None
    feed: Feed | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The layer's products that adapters may change."""
        return tuple(projection for part in self._parts for projection in part.projections)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        mixed = () if self.mixer is None else (projection.packed for projection in self.mixer.projections)
        return *mixed, *(() if self.feed is None else self.feed.linears)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products, such as the weights and biases of norms."""
        norms = (tensor for _, norm in self.norms for tensor in norm.tensors)
        return (*norms, *(tensor for part in self._parts for tensor in part.tensors))

    @property
    def _parts(self) -> tuple[Mixer | Feed, ...]:
        return tuple(part for part in (self.mixer, self.feed) if part is not None)

    def forward(self, hidden: Tensor, residual: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor | None]:
        """Computes a layer: rows [T, hidden_size] and their residual, not yet added -> the same for the layer's output.

        `residual_scale` is a factor of the rows when they are added to the residual.
        """
        backend, norms, scale = context.backend, self.norms, self.config.residual_scale
        match self.config.placement:
            case Placement.PRE:
                if norms.pre_attention is not None:
                    normed, residual = norms.pre_attention.apply(backend, hidden, residual, scale)
                    hidden = self._mix(normed, context)
                if norms.pre_feed is not None:
                    normed, residual = norms.pre_feed.apply(backend, hidden, residual, scale)
                    hidden = self._feed(normed, context)
                return hidden, residual
            case Placement.PRE_FEED:
                assert norms.pre_feed is not None and residual is None
                normed, residual = norms.pre_feed.apply(backend, self._mix(hidden, context), hidden, scale)
                return self._feed(normed, context), residual
            case Placement.AFTER_SUMS:
                assert norms.post_attention is not None and norms.post_feed is not None and residual is None
                summed, _ = norms.post_attention.apply(backend, self._mix(hidden, context), hidden, scale)
                return norms.post_feed.apply(backend, self._feed(summed, context), summed, scale)[0], None
            case Placement.POST:
                assert residual is None
                total = self._add(norms.post_attention, self._mix(hidden, context), hidden, context)
                return self._add(norms.post_feed, self._feed(total, context), total, context), None
            case Placement.SANDWICH:
                assert norms.pre_attention is not None and norms.pre_feed is not None and residual is None
                normed, _ = norms.pre_attention.apply(backend, hidden)
                total = self._add(norms.post_attention, self._mix(normed, context), hidden, context)
                normed, _ = norms.pre_feed.apply(backend, total)
                return self._add(norms.post_feed, self._feed(normed, context), total, context), None
            case Placement.PARALLEL | Placement.PARALLEL_TWO:
                assert norms.pre_attention is not None
                normed, total = norms.pre_attention.apply(backend, hidden, residual, scale)
                fed = normed if norms.pre_feed is None else norms.pre_feed.apply(backend, total)[0]
                total = backend.add(self._mix(normed, context), total, scale)
                return self._feed(fed, context), total

    def _add(self, norm: NormLayer | None, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        assert norm is not None and norm.kind is NormKind.RMS
        scale = self.config.residual_scale
        return context.backend.add_normed(hidden, norm.weight, norm.epsilon, residual, scale)

    def _mix(self, normed: Tensor, context: StepContext) -> Tensor:
        assert self.mixer is not None
        return self.mixer.forward(normed, context, self.index)

    def _feed(self, normed: Tensor, context: StepContext) -> Tensor:
        assert self.feed is not None
        return self.feed.forward(normed, context.backend, context.lora)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The tables and the norm before the first layer, on the first stage."""

    table: Tensor | PackedLinear
    """[vocabulary, hidden_size]: a row of each token."""
    positions: Tensor | None = None
    """[positions, hidden_size]: a row for each position; None: positions are encoded by rotary embeddings."""
    token_types: Tensor | None = None
    """[types, hidden_size]: a row for each token type."""
    norm: NormLayer | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products."""
        tables = (self.table, self.positions, self.token_types)
        norm = self.norm.tensors if self.norm else ()
        return (*(tensor for tensor in tables if isinstance(tensor, torch.Tensor)), *norm)


@dataclass(frozen=True, slots=True, eq=False)
class LMHead:
    """The final norm and the head that computes logits, on the last stage."""

    norm: NormLayer | None
    head: PackedLinear | None
    """The product that makes logits; None: rows are pooled."""
    pooling: PoolingHead | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return (*((self.head,) if self.head else ()), *(self.pooling.products if self.pooling else ()))


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The vocabulary of a network whose ranks hold equal shares of it, the last one perhaps less."""

    vocab_size: int
    collectives: Collectives

    @property
    def first_token(self) -> int:
        return self.collectives.rank * self._rank_tokens

    @property
    def _rank_tokens(self) -> int:
        return vocabulary_share(self.vocab_size, self.collectives.size)

    def gather(self, logits: Tensor) -> Tensor | None:
        """Returns the logits [R, vocab_size] of all ranks' [R, tokens] at rank 0, None elsewhere."""
        if self.collectives.size == 1:
            return logits
        missing = self._rank_tokens - logits.shape[1]
        whole = self.collectives.gather(functional.pad(logits, (0, missing)) if missing else logits)
        return None if whole is None else whole[:, : self.vocab_size].contiguous()
