"""Counts the bytes that the largest step takes at once, beside weights and blocks. From sizes: nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.capacity.weights import ITEM_BYTES, feed_products, layer_products
from blockyard.model_config.decoder_config import Experts
from blockyard.model_config.stored_weights import SMALLEST_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.capacity.weights import WeightFormat
    from blockyard.contract.workers import ProfileRequest
    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.share import Share

FLOAT_BYTES = 4
# At most as many copies of all logits live at once: given, and kept as they were.
LOGITS_COPIES = 2
# Rows of prompts whose logits are made at a time, and their elements (16 MiB).
MAX_PROMPT_ROWS = 512
MAX_PROMPT_LOGITS = 1 << 22
# Memory of a row that the kernels for processors quantize, beside its bytes: two cache lines and a scale.
QUANTIZED_ROW_BYTES = 2 * 64 + FLOAT_BYTES
# And of each group of weights of four bits: a scale and a sum.
GROUP_BYTES = 2 * FLOAT_BYTES
# Memory for sorting, for each number of a row of logits and each thread.
CPU_SCRATCH_BYTES = 25
# Numbers that torch's ops sort at a time, and their copies.
MAX_CHOSEN_LOGITS = 1 << 21
SORTING_COPIES = 12


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step."""

    num_tokens: int
    num_sequences: int

    @classmethod
    def largest(cls, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> StepSize:
        """Returns the largest step that limits allow: few sequences may be too short together for all the tokens."""
        num_sequences = min(max_num_seqs, max_num_batched_tokens)
        return cls(min(max_num_batched_tokens, num_sequences * max_model_len), num_sequences)


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """What choosing tokens of rows takes beside their logits, and what their log probabilities take: of a backend."""

    choose_bytes: Callable[[int, int], int]
    token_logprobs_bytes: Callable[[int, int], int]

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Bounds the bytes that sampling `num_rows` rows takes, with their logits."""
        kept = LOGITS_COPIES * num_rows * vocab_size * FLOAT_BYTES
        return kept + max(self.choose_bytes(num_rows, vocab_size), self.token_logprobs_bytes(num_rows, vocab_size))

    def logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Bounds the bytes that log probabilities of `num_rows` rows take, with their logits."""
        return num_rows * vocab_size * FLOAT_BYTES + self.token_logprobs_bytes(num_rows, vocab_size)


def cpu_scratch(num_threads: int) -> SamplingScratch:
    def count(num_rows: int, vocab_size: int) -> int:
        return num_threads * vocab_size * CPU_SCRATCH_BYTES

    return SamplingScratch(count, count)


def torch_scratch() -> SamplingScratch:
    """Returns what torch's ops take (`kernels.reference.sampling`), and about what kernels for GPUs do."""

    def choose(num_rows: int, vocab_size: int) -> int:
        return SORTING_COPIES * min(num_rows * vocab_size, max(MAX_CHOSEN_LOGITS, vocab_size)) * FLOAT_BYTES

    def token_logprobs(num_rows: int, vocab_size: int) -> int:
        return LOGITS_COPIES * num_rows * vocab_size * FLOAT_BYTES

    return SamplingScratch(choose, token_logprobs)


def max_prompt_rows(vocab_size: int) -> int:
    """Returns how many rows of prompts get their log probabilities at a time."""
    return max(1, min(MAX_PROMPT_ROWS, MAX_PROMPT_LOGITS // vocab_size))


def least_step_bytes(network: DecoderConfig, size: StepSize, scratch: SamplingScratch) -> int:
    """Computes what any step holds at once: a layer's inner rows, logits and their working copies."""
    feed, hidden = network.layers[0].feed, network.hidden_size
    row = 4 * hidden + 3 * network.intermediate_size
    if isinstance(feed, Experts):
        row = 4 * hidden + feed.router.top_k * (3 * network.intermediate_size + 2 * hidden)
    if network.pooling is not None:
        # Rows in float32, where they are added up or answered.
        return size.num_tokens * (row * ITEM_BYTES[network.dtype_name] + 2 * hidden * FLOAT_BYTES)
    num_prompt_rows = min(max_prompt_rows(network.vocab_size), size.num_tokens)
    sampling = scratch.sampling_bytes(size.num_sequences, network.vocab_size)
    prompts = scratch.logprobs_bytes(num_prompt_rows, network.vocab_size)
    return size.num_tokens * row * ITEM_BYTES[network.dtype_name] + max(sampling, prompts)


def arena_bytes(network: DecoderConfig, share: Share, held: WeightFormat, max_rows: int) -> int:
    """Bounds the arena of a captured step, and the rows that its products quantize.

    It is what lies beside one another where each buffer is put as low as it fits (`kernels.cpu.plan`): hidden rows, and
    projections with what is attended, or the inner rows, or sums in float32 that ranks add; and always a row's angles.
    """
    item, hidden = ITEM_BYTES[network.dtype_name], network.hidden_size
    queries = len(share.heads) * network.head_dim
    projected = queries + 2 * len(share.kv_heads) * network.head_dim
    sums = hidden * FLOAT_BYTES // item * share.is_cut
    fed, copies = len(share.mlp), 1
    feed = network.layers[0].feed
    if isinstance(feed, Experts):
        # Copies of a row, or sums in float32, beside inner rows; logits of experts, and where copies are.
        copies = feed.router.top_k
        routed = FLOAT_BYTES * (feed.num_experts + 3 * copies) // item
        fed = copies * (fed + hidden * FLOAT_BYTES // item) + routed
    numbers = max(4 * hidden + max(projected, fed, sums), 3 * hidden + projected + queries)
    angles = sum(rotary.num_angles(network.head_dim) for rotary in network.rotaries)
    rows = item * (numbers + angles)
    widest = max(product.in_features for product in (*layer_products(network, share), *feed_products(network, share)))
    quantized = 0
    if held.is_quantized or (network.stored is not None and held.panel_columns > 1):
        quantized = widest + QUANTIZED_ROW_BYTES + widest // SMALLEST_GROUP * GROUP_BYTES * (network.stored is not None)
    return max_rows * (rows + copies * quantized)


def step_bytes(
    network: DecoderConfig, share: Share, held: WeightFormat, request: ProfileRequest, scratch: SamplingScratch
) -> int:
    """Counts what the largest step takes that a request allows."""
    size = StepSize.largest(request.max_num_batched_tokens, request.max_num_seqs, network.max_model_len)
    max_rows = max(request.max_num_batched_tokens, request.max_num_seqs)
    return arena_bytes(network, share, held, max_rows) + least_step_bytes(network, size, scratch)
