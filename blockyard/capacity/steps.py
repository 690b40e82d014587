"""Estimates the peak bytes of the largest step beside weights and blocks, from sizes and without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.capacity.weights import ITEM_BYTES, WeightFormat, feed_products, layer_products
from blockyard.model_config.decoder_config import DecoderConfig, Experts
from blockyard.model_config.recurrent import RecurrentKind
from blockyard.model_config.stored_weights import SMALLEST_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.workers import ProfileRequest
    from blockyard.model_config.decoder_config import Mlp
    from blockyard.model_config.share import Share

FLOAT_BYTES = 4
# At most two copies of all logits live at once: the working copy and the originals.
LOGITS_COPIES = 2
# Prompt rows whose logits are computed at a time, and the most elements of them (16 MiB).
MAX_PROMPT_ROWS = 512
MAX_PROMPT_LOGITS = 1 << 22
# Overhead of a row that the CPU kernels quantize, beside its bytes: two cache lines and a scale.
QUANTIZED_ROW_BYTES = 2 * 64 + FLOAT_BYTES
# Overhead of each group of four-bit weights: a scale and a sum.
GROUP_BYTES = 2 * FLOAT_BYTES
# Sorting memory per logit of a row and per thread.
CPU_SCRATCH_BYTES = 25
# Room of each thread for what cuts of attention give, where there are several.
CPU_ATTENTION_BYTES = 4 << 20
# Logits that torch's ops sort at a time, and the copies that sorting makes.
MAX_CHOSEN_LOGITS = 1 << 21
SORTING_COPIES = 12


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of the largest step."""

    num_tokens: int
    num_sequences: int

    @classmethod
    def largest(cls, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> StepSize:
        """Returns the largest step within the limits; few sequences may not fill `max_num_batched_tokens`."""
        num_sequences = min(max_num_seqs, max_num_batched_tokens)
        return cls(min(max_num_batched_tokens, num_sequences * max_model_len), num_sequences)


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """A backend's scratch memory for sampling and for log probabilities, as functions of rows and vocabulary.

    `attention_bytes`: the scratch memory of attention.
    """

    choose_bytes: Callable[[int, int], int]
    token_logprobs_bytes: Callable[[int, int], int]
    attention_bytes: int = 0

    def sampling_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Returns an upper bound of the bytes for sampling `num_rows` rows, their logits included."""
        kept = LOGITS_COPIES * num_rows * vocab_size * FLOAT_BYTES
        return kept + max(self.choose_bytes(num_rows, vocab_size), self.token_logprobs_bytes(num_rows, vocab_size))

    def logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Returns an upper bound of the bytes for the log probabilities of `num_rows` rows, their logits included."""
        return num_rows * vocab_size * FLOAT_BYTES + self.token_logprobs_bytes(num_rows, vocab_size)


def cpu_scratch(num_threads: int) -> SamplingScratch:
    def count(num_rows: int, vocab_size: int) -> int:
        return num_threads * vocab_size * CPU_SCRATCH_BYTES

    return SamplingScratch(count, count, num_threads * CPU_ATTENTION_BYTES if num_threads > 1 else 0)


def torch_scratch() -> SamplingScratch:
    """Returns the scratch memory of torch's ops (`blockyard_kernels.reference.sampling`); a GPU's takes as much."""

    def choose(num_rows: int, vocab_size: int) -> int:
        return SORTING_COPIES * min(num_rows * vocab_size, max(MAX_CHOSEN_LOGITS, vocab_size)) * FLOAT_BYTES

    def token_logprobs(num_rows: int, vocab_size: int) -> int:
        return LOGITS_COPIES * num_rows * vocab_size * FLOAT_BYTES

    return SamplingScratch(choose, token_logprobs)


def max_prompt_rows(vocab_size: int) -> int:
    """Returns how many prompt rows are given log probabilities at a time."""
    return max(1, min(MAX_PROMPT_ROWS, MAX_PROMPT_LOGITS // vocab_size))


def least_step_bytes(network: DecoderConfig, size: StepSize, scratch: SamplingScratch) -> int:
    """Computes the bytes that the largest step holds at least: a layer's inner rows, logits and their copies."""
    hidden = network.hidden_size
    row = 4 * hidden + max(_inner_numbers(feed, hidden) for feed in network.feeds)
    if network.pooling is not None:
        # Pooling adds rows up, or returns them, in float32.
        return size.num_tokens * (row * ITEM_BYTES[network.dtype_name] + 2 * hidden * FLOAT_BYTES)
    num_prompt_rows = min(max_prompt_rows(network.vocab_size), size.num_tokens)
    sampling = scratch.sampling_bytes(size.num_sequences, network.vocab_size)
    prompts = scratch.logprobs_bytes(num_prompt_rows, network.vocab_size)
    return size.num_tokens * row * ITEM_BYTES[network.dtype_name] + max(sampling, prompts)


def _inner_numbers(feed: Mlp | Experts, hidden: int) -> int:
    """Counts the inner numbers of a row, and of its copies for each expert that it goes to."""
    if isinstance(feed, Experts):
        return feed.router.top_k * (3 * feed.inner_features + 2 * hidden)
    return 3 * feed.inner_features


def arena_bytes(network: DecoderConfig, share: Share, held: WeightFormat, max_rows: int) -> int:
    """Returns an upper bound of a captured step's arena bytes and of the rows that its products quantize.

    The arena places each buffer as low as it fits (`blockyard_kernels.cpu.plan`). At the peak it holds hidden rows,
    plus the largest of: projections and attention output, the MLP's inner rows, float32 sums that ranks add. Rotary
    angles are always held.
    """
    item, hidden = ITEM_BYTES[network.dtype_name], network.hidden_size
    queries = len(share.heads) * network.head_dim
    gates = queries * any(attention.gates_output for attention in network.attentions)
    projected = queries + gates + 2 * len(share.kv_heads) * network.head_dim
    mixing = projected + queries
    if network.recurrent is not None:
        mine = network.recurrent.share(share.tensor_parallel_size)
        if mine.kind is RecurrentKind.MAMBA2:
            # The scan gives float32, which is normalised into another buffer.
            results = mine.out_features * FLOAT_BYTES // item
            mixed = results + max(mine.conv_features, mine.out_features)
        else:
            # A gap between the buffers may be as large as the convolution's.
            mixed = 2 * (mine.conv_features + mine.out_features)
        mixing = max(mixing, mine.in_features + mixed)
        projected = max(projected, mine.in_features)
    sums = hidden * FLOAT_BYTES // item * share.is_cut
    feeds = network.feeds
    fed = max(_fed_numbers(feed, share, hidden, item) for feed in feeds)
    copies = max(feed.router.top_k if isinstance(feed, Experts) else 1 for feed in feeds)
    numbers = max(4 * hidden + max(projected, fed, sums), 3 * hidden + mixing)
    angles = sum(rotary.num_angles(network.head_dim) for rotary in network.rotaries)
    rows = item * (numbers + angles)
    products = (product for layer in network.layers for product in layer_products(network, share, layer))
    fed_products = (product for feed in feeds for product in feed_products(network, share, feed))
    widest = max(product.in_features for product in (*products, *fed_products))
    quantized = 0
    if held.is_quantized or (network.stored is not None and held.panel_columns > 1):
        quantized = widest + QUANTIZED_ROW_BYTES + widest // SMALLEST_GROUP * GROUP_BYTES * (network.stored is not None)
    return max_rows * (rows + copies * quantized)


def _fed_numbers(feed: Mlp | Experts, share: Share, hidden: int, item_bytes: int) -> int:
    """Counts a rank's numbers of a row in an MLP or in experts, at their peak."""
    inner = len(share.part(feed.inner_features))
    if not isinstance(feed, Experts):
        return inner
    # Per chosen expert a row has inner features and a copy or a float32 sum; then the router's logits and indices.
    top_k = feed.router.top_k
    routed = FLOAT_BYTES * (feed.num_experts + 3 * top_k) // item_bytes
    experts = top_k * (inner + hidden * FLOAT_BYTES // item_bytes) + routed
    return experts if feed.shared is None else max(experts, 2 * hidden + _fed_numbers(feed.shared, share, hidden, 1))


def step_bytes(
    network: DecoderConfig, share: Share, held: WeightFormat, request: ProfileRequest, scratch: SamplingScratch
) -> int:
    """Returns the peak bytes of the largest step that the profile request allows."""
    size = StepSize.largest(request.max_num_batched_tokens, request.max_num_seqs, network.max_model_len)
    max_rows = max(request.max_num_batched_tokens, request.max_num_seqs)
    arena = arena_bytes(network, share, held, max_rows) + scratch.attention_bytes
    return arena + least_step_bytes(network, size, scratch)
