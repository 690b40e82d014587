"""A decoder, run step by step: embedding, layers, a last norm, a head.

Architectures differ only in data (`blockyard.model_config.decoder_config`). Owns the weights; knows nothing of files,
requests, sampling or the allocation of blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID
from blockyard.model_config.kv_groups import KvGroups
from blockyard_kernels.lora import VirtualRows
from blockyard_kernels.ops import AttentionBatch, Backend, kv_pool_shape
from blockyard_kernels.shapes import AttentionShape, scale_width
from worker_service.models.description import Module, OtherModule, describe_modules, list_modules
from worker_service.models.layers import DecoderLayer, Embedding, LMHead, SharedVocabulary, StepContext
from worker_service.models.rotary import PART, rotary_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard.model_config.rotary import RotaryConfig
    from blockyard.model_config.share import Share
    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.packed import PackedLinear
    from worker_service.models.model_config import ModelConfig
    from worker_service.models.projections import ModuleNames
    from worker_service.pooling.head import PoolingHead

FINGERPRINT_TOKENS = 48
FINGERPRINT_BLOCK_SIZE = 16
DIGEST_BYTES = 32


class DecoderModel:
    """A network with its weights on one device."""

    foreign_code = ""
    """The foreign code that computes the model, with hashes; empty: none."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        beginning: Embedding | None,
        layers: Sequence[DecoderLayer],
        ending: LMHead | None,
        share: Share,
        names: ModuleNames,
    ) -> None:
        self.config = config
        self.share = share
        self.layers: Sequence[DecoderLayer] = layers
        self.names = names
        self.kv_groups = KvGroups.of(config, backend.device.type if backend.is_complete else "cuda")
        self._backend = backend
        self._beginning = beginning
        self._ending = ending
        # Whether embedding and head differ although the configuration ties them.
        self.has_two_tables = False
        attention, num_kv_heads = config.attention, len(share.kv_heads)
        self._shape = AttentionShape(
            len(share.heads),
            num_kv_heads,
            attention.head_dim,
            attention.scale,
            attention.softcap,
            is_causal=config.encoder is None,
        )
        self._first_token = share.vocabulary.start if share.is_cut else None
        scale = torch.tensor(config.embedding_scale, dtype=config.dtype)
        self._embedding_scale = scale.item() if config.rounds_embedding_scale else config.embedding_scale
        self._served_rotaries: Sequence[RotaryConfig] = ()
        self._tables: list[Tensor] = []
        self._serve_length(config.max_model_len)
        self._virtual: VirtualRows | None = None

    @property
    def pooling(self) -> PoolingHead | None:
        """The pooling head of a network that pools, on the last stage; None otherwise."""
        return self._ending.pooling if self._ending else None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the packed weights. A tied table counts twice if the packed head cannot serve as a table."""
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        if self._ending is not None:
            tensors += self._ending.norm.tensors if self._ending.norm else ()
            tensors += self._ending.pooling.own_tensors if self._ending.pooling else ()
        tensors += self._beginning.tensors if self._beginning else ()
        return sum(tensor.nbytes for tensor in tensors) + sum(linear.num_bytes for linear in self._linears())

    def replace_weights(self, other: DecoderModel | None) -> None:
        """Replaces the weights by those of a network of the same sizes; None: drops the weights until the next call.

        Captured steps stay valid if the new weights lie at the same addresses of the same arena.
        """
        self._beginning = other._beginning if other else None
        self.layers = other.layers if other else ()
        self._ending = other._ending if other else None

    def make_virtual_rows(self, num_rows: int) -> Tensor | None:
        """Makes zero embedding rows [num_rows, hidden_size] for ids from FIRST_VIRTUAL_ID on.

        Returns None if another stage has the embedding. Call it before `capture`. Rows that are written later are used
        from the next step on.
        """
        if not self.share.is_first_stage:
            return None
        rows = torch.zeros(num_rows, self.config.hidden_size, dtype=self.config.dtype, device=self._backend.device)
        self._virtual = VirtualRows(FIRST_VIRTUAL_ID, rows)
        return rows

    def serve_length(self, max_length: int) -> None:
        """Sets the length of the longest sequence that is served, and makes the rotary tables for it.

        Some rotary embeddings have other angles if long sequences are served. Call it before the first step.
        """
        self._serve_length(max_length)
        self.reserve_positions(max_length)

    def _serve_length(self, max_length: int) -> None:
        config = self.config
        self._served_rotaries = [rotary.for_length(max_length) for rotary in config.rotaries]
        self._tables = [
            torch.empty(0, rotary.num_angles(config.head_dim), dtype=config.dtype, device=self._backend.device)
            for rotary in config.rotaries
        ]

    def reserve_positions(self, num_positions: int) -> None:
        """Makes the rotary tables for that many positions. A step that needs more extends them.

        Models may allow lengths that no memory holds, so the tables only have the length that is served.
        """
        config = self.config
        length = min(-(-num_positions // PART) * PART, config.max_model_len)
        for index, rotary in enumerate(self._served_rotaries):
            if num_positions > len(self._tables[index]):
                table = rotary_table(rotary, config.head_dim, length, config.dtype)
                self._tables[index] = table.to(self._backend.device)

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """Computes one step.

        Args:
            token_ids: [T] int64, the new tokens of each sequence of the batch, in its order.
            batch: the step's metadata from `Backend.plan_attention`.
            kv_pool: the pool; the step's slots are written.
            token_types: [T] int64, for networks with token types; None: all are 0.

        Returns:
            [T, hidden_size], in the model's dtype: rows after the final norm, or on earlier stages the rows sent on.
        """
        backend = self._backend
        self.reserve_positions(int(batch.seq_lens.max(initial=0)))
        rotaries = [
            backend.embedding(batch.positions, table).unflatten(1, (-1, rotary.rotated(self.config.head_dim)))
            for rotary, table in zip(self.config.rotaries, self._tables, strict=True)
        ]
        context = StepContext(backend, batch, kv_pool, rotaries, self._shape, self.kv_groups.places(self.share.layers))
        hidden, residual = self._begin(token_ids, batch, token_types), None
        for layer in self.layers:
            hidden, residual = layer.forward(hidden, residual, context)
        scale = self.layers[-1].config.residual_scale
        if self._ending is not None and self._ending.norm is None:
            assert residual is None, "each layer ends in a norm"
            return hidden
        if self._ending is not None and self._ending.norm is not None:
            return self._ending.norm.apply(backend, hidden, residual, scale)[0]
        # Only the sum is sent: the next layer needs nothing else.
        total = hidden if residual is None else backend.add(hidden, residual, scale)
        backend.send(total)
        return total

    def _begin(self, token_ids: Tensor, batch: AttentionBatch, token_types: Tensor | None) -> Tensor:
        backend, config, beginning = self._backend, self.config, self._beginning
        if beginning is None:
            return backend.receive(len(token_ids), config.hidden_size, config.dtype)
        hidden = backend.embedding(token_ids, beginning.table, self._first_token, self._embedding_scale, self._virtual)
        if beginning.token_types is not None:
            types = torch.zeros_like(token_ids) if token_types is None else token_types
            hidden = backend.add(backend.embedding(types, beginning.token_types), hidden)
        if beginning.positions is not None:
            hidden = backend.add(backend.embedding(batch.positions, beginning.positions), hidden)
        return hidden if beginning.norm is None else beginning.norm.apply(backend, hidden)[0]

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits [R, tokens of the share] float32 of rows [R, hidden_size] of the last stage."""
        assert self._ending is not None and self._ending.head is not None, "the last stage has the head"
        return self._backend.linear(hidden, self._ending.head, wide=True)

    @torch.no_grad()
    def capture(self, kv_pool: Tensor, sizes: CaptureSizes) -> CapturedStep | None:
        """Captures a step over a pool, to be replayed without Python; None if the backend cannot, or for pooling.

        The rotary table must have enough positions for every step.
        """
        if self.config.pooling is not None:
            return None
        head = self._ending.head if self._ending else None
        sizes = replace(sizes, num_kv_groups=self.kv_groups.num_groups)
        return self._backend.capture(lambda ids, batch: self.forward(ids, batch, kv_pool), head, sizes)

    @torch.no_grad()
    def probe(self) -> bool:
        """Tests on this machine whether results are independent of the batch. Call it before the first step.

        See `blockyard_kernels.ops.Backend.probe`: the test may choose a slower but exact way of computing.
        """
        return self._backend.probe(self._linears(), self._shape)

    def fingerprint(self, ranks: Ranks | None = None) -> str:
        """Hashes the logits of a fixed list of tokens, in hex. It is equal if two workers compute the same bits.

        For a network that pools it hashes the rows and the results of the pooling head.

        It differs between weights, dtypes, backends, libraries and the instruction sets that they choose. Call it after
        `probe`, and on all ranks of a network.
        """
        hidden = self._fixed_rows()
        logits = self._answers(hidden) if self.share.is_last_stage else None
        if ranks is not None and logits is not None:
            logits = SharedVocabulary(self.config.vocab_size, ranks.stage).gather(logits)
        digest = bytes(DIGEST_BYTES) if logits is None else _hash(logits)
        return (digest if ranks is None else ranks.broadcast_end(np.frombuffer(digest, np.int32)).tobytes()).hex()

    def _answers(self, hidden: Tensor) -> Tensor:
        if self.pooling is None:
            return self.compute_logits(hidden)
        return torch.cat([hidden.float(), self.pooling.multiply(self._backend, hidden)], dim=1)

    def _fixed_rows(self) -> Tensor:
        token_ids = torch.arange(1, FINGERPRINT_TOKENS + 1, device=self._backend.device) * 7919 % self.config.vocab_size
        config, share, groups = self.config, self.share, self.kv_groups
        num_blocks, lengths = FINGERPRINT_TOKENS // FINGERPRINT_BLOCK_SIZE, [FINGERPRINT_TOKENS]
        block_tables = np.arange(groups.num_groups * num_blocks).reshape(-1, num_blocks)
        sizes = FINGERPRINT_BLOCK_SIZE, config.sliding_window, groups.num_groups
        batch = self._backend.plan_attention(lengths, lengths, block_tables, *sizes)
        heads = len(share.kv_heads), FINGERPRINT_BLOCK_SIZE, config.head_dim + scale_width(config.kv_dtype)
        shape = kv_pool_shape(block_tables.size, groups.count_layers(share.layers), *heads)
        pool = torch.empty(shape, dtype=config.kv_dtype, device=self._backend.device)
        return self.forward(token_ids, batch, pool)

    def modules(self) -> list[Module | OtherModule]:
        """Lists this rank's modules in the order of a step; None while the weights are dropped."""
        return list_modules(self.config, self.share, self.names, self._beginning, self.layers, self._ending)

    def describe(self, kernels: str) -> str:
        """Describes the network, in lines. `kernels`: the name of the backend."""
        layers, config = self.share.layers, self.config
        part = "" if len(layers) == config.num_layers else f", layers {layers.start}–{layers.stop - 1}"
        dtype = str(config.dtype).removeprefix("torch.")
        title = f"{config.architecture}: {config.num_layers} layers{part}, {dtype} by {kernels}"
        return describe_modules(title, self.modules())

    def _linears(self) -> list[PackedLinear]:
        linears = [linear for layer in self.layers for linear in layer.linears]
        return [*linears, *self._ending.linears] if self._ending else linears


def _hash(logits: Tensor) -> bytes:
    return hashlib.sha256(logits.cpu().numpy().tobytes()).digest()
