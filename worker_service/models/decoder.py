"""The network of Llama and its relatives (Mistral, Qwen2, Qwen3): built from a folder's weights, run step by step.

The families differ in data alone (`model_config`, `registry`). Owns the weights; knows nothing of requests, sampling
or where blocks come from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID
from blockyard.model_config.share import Share
from blockyard.parallel import ALONE
from kernels.arena import keep
from kernels.lora import VirtualRows
from kernels.ops import AttentionShape, kv_pool_shape
from kernels.select import make_arena
from worker_service.models.description import describe_modules, list_modules
from worker_service.models.layers import DecoderLayer, StepContext
from worker_service.models.packed_files import PackedWeights
from worker_service.models.rotary import PART, rotary_table
from worker_service.models.vocabulary import SharedVocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard.parallel import Parallel
    from kernels.arena import Arena
    from kernels.collectives import Ranks
    from kernels.ops import AttentionBatch, Backend, CapturedStep, CaptureSizes, PackedLinear
    from worker_service.models.description import Module
    from worker_service.models.model_config import ModelConfig
    from worker_service.models.weights import Weights


FINGERPRINT_TOKENS = 48
FINGERPRINT_BLOCK_SIZE = 16
DIGEST_BYTES = 32


class DecoderModel:
    """A network with its weights on one device."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        embedding: Tensor | PackedLinear | None,
        layers: Sequence[DecoderLayer],
        ending: tuple[Tensor, PackedLinear] | None,
        share: Share,
    ) -> None:
        self.config = config
        self.share = share
        self.layers: Sequence[DecoderLayer] = layers
        self._backend = backend
        self._embedding = embedding
        # Though its configuration ties them.
        self.has_two_tables = False
        # The last stage's: its norm and its head.
        self._ending = ending
        num_heads, num_kv_heads = len(share.heads), len(share.kv_heads)
        self._shape = AttentionShape(num_heads, num_kv_heads, config.head_dim, config.head_dim**-0.5)
        self._first_token = share.vocabulary.start if share.is_cut else None
        self._virtual: VirtualRows | None = None
        self._rotary = layers[0].input_norm.new_empty(0, 2 * config.head_dim)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights as they are held: a tied table is held twice where its packed form is no table."""
        tensors = [norm for layer in self.layers for norm in layer.norms]
        tensors += [self._ending[0]] if self._ending else []
        tensors += [self._embedding] if isinstance(self._embedding, torch.Tensor) else []
        return sum(tensor.nbytes for tensor in tensors) + sum(linear.num_bytes for linear in self._linears())

    def replace_weights(self, other: DecoderModel | None) -> None:
        """Takes the weights of a network of the same sizes for its own; None: lets go of its own, to take others later.

        What was recorded of it stays valid where both lie in one arena, at the same addresses.
        """
        self._embedding = other._embedding if other else None
        self.layers = other.layers if other else ()
        self._ending = other._ending if other else None

    def make_virtual_rows(self, num_rows: int) -> Tensor | None:
        """Makes rows [num_rows, hidden_size] for ids from FIRST_VIRTUAL_ID on, zeros; None: another stage embeds.

        Call it before `capture`. What is written to them is embedded from the next step on.
        """
        if not self.share.is_first_stage:
            return None
        rows = torch.zeros(num_rows, self.config.hidden_size, dtype=self.config.dtype, device=self._backend.device)
        self._virtual = VirtualRows(FIRST_VIRTUAL_ID, rows)
        return rows

    def reserve_positions(self, num_positions: int) -> None:
        """Makes the rotary table for that many positions. A step that needs more extends it.

        Models may name a length that no memory holds, so the table has that of what is served.
        """
        if num_positions > len(self._rotary):
            config = self.config
            length = min(-(-num_positions // PART) * PART, config.max_model_len)
            table = rotary_table(config.rotary, config.head_dim, length, config.dtype)
            self._rotary = table.to(self._backend.device)

    @torch.no_grad()
    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor) -> Tensor:
        """Computes one step.

        Args:
            token_ids: [T] int64, the new tokens of each sequence of the batch, in its order.
            batch: what `Backend.plan_attention` made for the step.
            kv_pool: the pool, of which the step's slots are written.

        Returns:
            [T, hidden_size]: each row after the final norm, in the model's dtype; before the last stage as it was sent.
        """
        backend, config = self._backend, self.config
        self.reserve_positions(int(batch.seq_lens.max(initial=0)))
        rotary = backend.embedding(batch.positions, self._rotary).view(-1, 2, config.head_dim)
        context = StepContext(backend, batch, kv_pool, rotary, self._shape, config.options.norm_epsilon)
        if self._embedding is not None:
            hidden, residual = backend.embedding(token_ids, self._embedding, self._first_token, self._virtual), None
        else:
            hidden, residual = backend.receive(len(token_ids), config.hidden_size, config.dtype), None
        for layer in self.layers:
            hidden, residual = layer.forward(hidden, residual, context)
        if self._ending is not None:
            return backend.rms_norm(hidden, self._ending[0], config.options.norm_epsilon, residual)[0]
        # What travels is the sum, which is all that the next layer begins with; the norm beside it is of no use.
        total = backend.rms_norm(hidden, self.layers[-1].input_norm, config.options.norm_epsilon, residual)[1]
        backend.send(total)
        return total

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits [R, tokens of the share] float32 of rows [R, hidden_size] of the last stage."""
        assert self._ending is not None, "the last stage has the head"
        return self._backend.linear(hidden, self._ending[1], wide=True)

    @torch.no_grad()
    def capture(self, kv_pool: Tensor, sizes: CaptureSizes) -> CapturedStep | None:
        """Records a step over a pool, to be replayed without Python; None where the backend cannot.

        The rotary table must reach as far as any step will.
        """
        head = self._ending[1] if self._ending else None
        return self._backend.capture(lambda ids, batch: self.forward(ids, batch, kv_pool), head, sizes)

    @torch.no_grad()
    def probe(self) -> bool:
        """Tries to prove on this machine that results do not depend on the batch. Call it before the first step.

        See `kernels.ops.Backend.probe`: on the way a slower but exact way of computing may be chosen.
        """
        return self._backend.probe(self._linears(), self._shape)

    def fingerprint(self, ranks: Ranks | None = None) -> str:
        """Hashes the logits of a fixed list of tokens, in hex: equal where two workers compute the same bits.

        It differs between weights, dtypes, backends, libraries and the instruction sets that they chose. Call it after
        `probe`; where ranks share a network, at all of them.
        """
        hidden = self._fixed_rows()
        logits = self.compute_logits(hidden) if self._ending else None
        if ranks is not None and logits is not None:
            logits = SharedVocabulary(self.config.vocab_size, ranks.stage).gather(logits)
        digest = bytes(DIGEST_BYTES) if logits is None else _hash(logits)
        return (digest if ranks is None else ranks.broadcast_end(np.frombuffer(digest, np.int32)).tobytes()).hex()

    def _fixed_rows(self) -> Tensor:
        token_ids = torch.arange(1, FINGERPRINT_TOKENS + 1, device=self._backend.device) * 7919 % self.config.vocab_size
        num_blocks = FINGERPRINT_TOKENS // FINGERPRINT_BLOCK_SIZE
        block_tables = [list(range(num_blocks))]
        batch = self._backend.plan_attention(
            [FINGERPRINT_TOKENS], [FINGERPRINT_TOKENS], block_tables, FINGERPRINT_BLOCK_SIZE, self.config.sliding_window
        )
        config, share = self.config, self.share
        heads = len(share.kv_heads), FINGERPRINT_BLOCK_SIZE, config.head_dim
        shape = kv_pool_shape(num_blocks, len(share.layers), *heads)
        pool = torch.empty(shape, dtype=config.dtype, device=self._backend.device)
        return self.forward(token_ids, batch, pool)

    def modules(self) -> list[Module]:
        """Lists this rank's modules in the order of a step. None, while it has let go of its weights."""
        return list_modules(self.config, self.share, self._embedding, self.layers, self._ending)

    def describe(self, kernels: str) -> str:
        """Describes the network, in lines; `kernels`: what computes it."""
        layers, config = self.share.layers, self.config
        part = "" if len(layers) == config.num_layers else f", layers {layers.start}–{layers.stop - 1}"
        dtype = str(config.dtype).removeprefix("torch.")
        title = f"{config.architecture}: {config.num_layers} layers{part}, {dtype} by {kernels}"
        return describe_modules(title, self.modules())

    def _linears(self) -> list[PackedLinear]:
        linears = [linear for layer in self.layers for linear in layer.linears]
        return [*linears, self._ending[1]] if self._ending else linears


def _join(biases: Sequence[Tensor]) -> Tensor:
    """Concatenates biases: without numbers by their lengths alone, since torch would load its compiler (1.6 s)."""
    if biases[0].is_meta:
        return biases[0].new_empty(sum(map(len, biases)))
    return torch.cat(list(biases))


def _hash(logits: Tensor) -> bytes:
    return hashlib.sha256(logits.cpu().numpy().tobytes()).digest()


def build_decoder(
    config: ModelConfig, backend: Backend, files: Weights, parallel: Parallel = ALONE, arena: Arena | None = None
) -> DecoderModel:
    """Reads and packs a rank's share of the weights, one tensor at a time, in an order that the configuration gives.

    `arena`: where they go; None: one of its own.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, where the files and the configuration do not belong together.
    """
    arena = make_arena(backend.device) if arena is None else arena
    if isinstance(files, PackedWeights):
        arena = files.fill(arena)
    return NetworkBuilder(config, backend, files, Share.of(config, parallel), arena).build()


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's part of some dimension: a range of `count` units of so many features each."""

    count: int
    units: range
    unit: int = 1

    @property
    def size(self) -> int:
        """Features of the whole."""
        return self.count * self.unit

    @property
    def part(self) -> slice:
        """This rank's features."""
        return slice(self.units.start * self.unit, self.units.stop * self.unit)


class NetworkBuilder:
    """Reads tensors under the names that transformers gives them."""

    def __init__(self, config: ModelConfig, backend: Backend, files: Weights, share: Share, arena: Arena) -> None:
        self._config = config
        self._arena = arena
        self._backend = backend
        self._files = files
        self._share = share
        self._has_found_two = False
        # Tensors are another stage's: they count in the digest of the weights, and are not read.
        self._passes_over = False

    def build(self) -> DecoderModel:
        config, share = self._config, self._share
        # The largest come first, while there is room for a file's pages beside them.
        embedding, head = self._embedding_and_head()
        layers: list[DecoderLayer] = []
        for index in range(config.num_layers):
            self._passes_over = index not in share.layers
            layer = self._layer(index)
            layers += [] if self._passes_over else [layer]
        self._passes_over = not share.is_last_stage
        final_norm = self._tensor("model.norm.weight", config.hidden_size)
        ending = (final_norm, head) if head is not None and share.is_last_stage else None
        model = DecoderModel(config, self._backend, embedding, layers, ending, share)
        model.has_two_tables = self._has_found_two
        return model

    def _embedding_and_head(self) -> tuple[Tensor | PackedLinear | None, PackedLinear | None]:
        config, share = self._config, self._share
        shape, tokens = (config.vocab_size, config.hidden_size), slice(share.vocabulary.start, share.vocabulary.stop)
        if not config.options.tied_embeddings or self._has_two_tables(shape):
            self._passes_over = not share.is_first_stage
            table = self._keep(self._read("model.embed_tokens.weight", *shape, part=(tokens,)))
            self._passes_over = not share.is_last_stage
            head = self._linear("", {"lm_head": _Cut(config.vocab_size, share.vocabulary)}, shape[1], bias=False)
            return (table if share.is_first_stage else None), (head if share.is_last_stage else None)
        names = ("model.embed_tokens.weight", "lm_head.weight")
        self._passes_over = not (share.is_first_stage or share.is_last_stage)
        tied = self._read(next((name for name in names if name in self._files), names[0]), *shape, part=(tokens,))
        head = self._pack([tied]) if share.is_last_stage else None
        if not share.is_first_stage:
            return None, head
        return (head if head is not None and head.is_table else self._keep(tied)), head

    def _pack(self, weights: Sequence[Tensor], bias: Tensor | None = None, **how: Any) -> PackedLinear:
        """Packs a weight, unless it is another stage's: then the result is of no use, and is not kept."""
        if self._passes_over:
            return cast("PackedLinear", None)
        return self._backend.pack_linear(weights, bias, **how, arena=self._arena)

    def _has_two_tables(self, shape: tuple[int, int]) -> bool:
        """Returns whether files that should tie their two tables hold two that differ; then both are used.

        As in transformers; there are models whose config.json says that they are tied and that are not.
        """
        names = ("model.embed_tokens.weight", "lm_head.weight")
        if not all(name in self._files for name in names):
            return False
        embedding, head = (self._files.read(name, shape) for name in names)
        # What was saved, without numbers or cut, has the same table only once.
        is_saved = embedding.is_meta or tuple(embedding.shape) != shape
        self._has_found_two = is_saved or not torch.equal(embedding, head)
        return self._has_found_two

    def _layer(self, index: int) -> DecoderLayer:
        config, options, share = self._config, self._config.options, self._share
        hidden, dim = config.hidden_size, config.head_dim
        query, key = _Cut(config.num_heads, share.heads, dim), _Cut(config.num_kv_heads, share.kv_heads, dim)
        inner = _Cut(config.intermediate_size, share.mlp)
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return DecoderLayer(
            index=index - share.layers.start,
            sliding_window=config.windows[index],
            input_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(attention, {"q_proj": query, "k_proj": key, "v_proj": key}, hidden, bias=options.qkv_bias),
            qk_norms=self._qk_norms(attention),
            output=self._row_parallel(attention + "o_proj", query, share.output_leaves, bias=options.output_bias),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias=options.mlp_bias, gated=True
            ),
            down=self._row_parallel(mlp + "down_proj", inner, share.down_leaves, bias=options.mlp_bias),
        )

    def _qk_norms(self, prefix: str) -> tuple[Tensor, Tensor, float] | None:
        options, head_dim = self._config.options, self._config.head_dim
        if not options.qk_norm:
            return None
        query, key = (self._tensor(f"{prefix}{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
        return query, key, options.norm_epsilon

    def _linear(
        self, prefix: str, parts: dict[str, _Cut], in_features: int, *, bias: bool, gated: bool = False
    ) -> PackedLinear:
        """Reads projections of the same input (name and outputs of each) and packs this rank's outputs as one."""
        weights = [
            self._read(f"{prefix}{name}.weight", cut.size, in_features, part=(cut.part,)) for name, cut in parts.items()
        ]
        biases = [self._read(f"{prefix}{name}.bias", cut.size, part=(cut.part,)) for name, cut in parts.items() if bias]
        return self._pack(weights, _join(biases) if bias else None, gated=gated)

    def _row_parallel(self, name: str, inputs: _Cut, leaves: int, *, bias: bool) -> PackedLinear:
        """Reads a projection back to the hidden size, and packs this rank's inputs of it, with the whole bias."""
        hidden = self._config.hidden_size
        weight = self._read(name + ".weight", hidden, inputs.size, part=(slice(None), inputs.part))
        added = self._read(name + ".bias", hidden).clone() if bias else None
        return self._pack([weight], added, leaves=leaves, partial=self._share.is_cut)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._keep(self._read(name, *shape))

    def _keep(self, tensor: Tensor) -> Tensor:
        """Copies what stays: what is read may lie in a file."""
        return tensor if self._passes_over else keep(self._arena, tensor)

    def _read(self, name: str, *shape: int, part: tuple[slice, ...] = ()) -> Tensor:
        """Returns a part of a tensor in the model's dtype: perhaps the file itself, mapped.

        Without numbers if it is passed over, or if others fill what is built.
        """
        if self._passes_over:
            self._files.pass_over(name, shape)
            return torch.empty(shape, dtype=self._config.dtype, device="meta")[part]
        tensor = self._read_part(name, shape, part)
        return tensor if tensor.is_meta else tensor.to(self._backend.device, self._config.dtype)

    def _read_part(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        tensor = self._files.read(name, shape)
        return tensor[part] if tuple(tensor.shape) == shape else tensor
