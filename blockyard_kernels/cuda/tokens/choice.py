"""The choice of a token for each row, in Triton. See `blockyard_kernels.sampling.Choices`.

Every filter keeps a prefix of the row's tokens in order of their values, so a single bound describes the tokens that
pass all filters, and no row is sorted. Kernels that read whole rows have one program for each chunk of a row. Kernels
that search a bound have one program for each row, which only reads the groups of tokens that may hold the bound. The
result of a chunk is a maximum or a sum of integers, so that a row's token depends on that row only. Launches depend on
shapes only, and the host never waits for the device.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.tokens.order import (
    GROUP,
    IMPOSSIBLE,
    end_of_ties,
    load_best,
    load_logits,
    mass_of,
    order_of,
    passes_bound,
    search,
    unit_of_weight,
    value_of,
    weigh,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.sampling import Choices

# Columns of the table of sampling parameters, int32: floats are stored as their bits, a seed as two words.
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, SEED_LOW, SEED_HIGH, POSITION, SEQUENCE_INDEX = map(tl.constexpr, range(8))
NUM_COLUMNS = tl.constexpr(8)


@triton.jit
def _find_best(logits, group_values, chunk_values, chunk_ids, size, BLOCK: tl.constexpr):
    """Finds the largest logit of each group, and the largest logit and its token of each chunk."""
    row, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits + row * size, token_ids, token_ids < size)
    value, place = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(chunk_values + row * num_chunks + chunk, value)
    tl.store(chunk_ids + row * num_chunks + chunk, chunk * BLOCK + place)
    groups = (row * num_chunks + chunk) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(group_values + groups, tl.max(tl.reshape(values, [BLOCK // GROUP, GROUP]), 1))


@triton.jit
def _load_filters(choices, row):
    """Returns a row's temperature, top_k, top_p and the logarithm of min_p."""
    asked = choices + row * NUM_COLUMNS
    temperature = tl.load(asked + TEMPERATURE).to(tl.float32, bitcast=True)
    top_p = tl.load(asked + TOP_P).to(tl.float32, bitcast=True)
    return temperature, tl.load(asked + TOP_K), top_p, tl.load(asked + LOG_MIN_P).to(tl.float32, bitcast=True)


@triton.jit
def _bound_of_min_p(best, log_min_p):
    """Returns the order of the smallest value that passes min_p; the best value passes in spite of rounding."""
    return tl.minimum(tl.maximum(order_of(best + log_min_p), IMPOSSIBLE + 1), order_of(best))


@triton.jit
def _weigh_chunks(logits, choices, chunk_values, masses, size, unit, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the weights of each chunk's tokens that pass min_p, for rows whose top_p is a share of this mass."""
    number, chunk, num_chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p, log_min_p = _load_filters(choices, number)
    if (temperature > 0) & (top_p < 1) & ((top_k <= 0) | (top_k >= size)):
        best = tl.div_rn(load_best(chunk_values, number, num_chunks, CHUNKS)[0], temperature)
        bound = _bound_of_min_p(best, log_min_p)
        row, count = logits + number * size + chunk * BLOCK, tl.minimum(size - chunk * BLOCK, BLOCK)
        mass = mass_of(row, row, count, count, temperature, bound, BLOCK, best, unit, False, BLOCK)
        tl.store(masses + number * num_chunks + chunk, mass)


@triton.jit
def _list_groups(
    choices, group_values, groups, num_listed, bounds, size, num_groups, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Lists, for each row that top_k or top_p filters, the groups that hold all tokens which may pass.

    Writes a lower bound to `bounds`, which all tokens that pass the filters also pass.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, log_min_p = _load_filters(choices, row)
    best_logit, _ = load_best(group_values, row, num_groups, GROUPS)
    best = tl.div_rn(best_logit, temperature)
    is_topped = (top_k > 0) & (top_k < size)
    low, found = _bound_of_min_p(best, log_min_p), tl.zeros([], tl.int32)
    if (temperature > 0) & (is_topped | (top_p < 1)) & (best > float("-inf")) & (best < float("inf")):
        high = order_of(best)
        maxima = group_values + row * num_groups
        if is_topped:
            # At least top_k groups have a maximum of at least this value, so at least top_k tokens have.
            low, _ = search(
                maxima, groups, num_groups, num_groups, temperature, low, high, top_k, best, 0.0, False, False, BLOCK
            )
        else:
            # All tokens below this value together weigh less than the share 1 - top_p of the best token's weight.
            low = tl.maximum(low, order_of(best + tl.log((1 - top_p) / size) - 0.125))
        places = tl.arange(0, GROUPS)
        values = tl.load(maxima + places, places < num_groups, float("-inf"))
        is_listed = (order_of(tl.div_rn(values, temperature)) >= low) & (places < num_groups)
        target = tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(groups + row * num_groups + target, places, is_listed)
        found = tl.sum(is_listed.to(tl.int32), 0)
    tl.store(num_listed + row, found)
    tl.store(bounds + row, low)


@triton.jit(do_not_specialize=["ends"])
def _find_bounds(
    logits, choices, chunk_values, masses, group_lists, num_listed, bounds, ends, size, num_chunks, num_groups, unit,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds each row's bound for the tokens that pass min_p, then top_k, then top_p."""
    number = tl.program_id(0).to(tl.int64)
    row, groups, count = logits + number * size, group_lists + number * num_groups, tl.load(num_listed + number) * GROUP
    temperature, top_k, top_p, _ = _load_filters(choices, number)
    best = tl.div_rn(load_best(chunk_values, number, num_chunks, CHUNKS)[0], temperature)
    bound, high = tl.load(bounds + number), order_of(best)
    end = size + tl.zeros([], tl.int32)
    if count > 0:
        mass = tl.zeros([], tl.int64)
        if (top_k > 0) & (top_k < size):
            bound, rest = search(
                row, groups, count, size, temperature, bound, high, top_k, best, unit, False, True, BLOCK
            )
            end = end_of_ties(row, groups, count, size, temperature, bound, rest, True, BLOCK)
            mass = mass_of(row, groups, count, size, temperature, bound, end, best, unit, True, BLOCK)
        elif top_p < 1:
            chunks = tl.arange(0, CHUNKS)
            mass = tl.sum(tl.load(masses + number * num_chunks + chunks, chunks < num_chunks, 0), 0)
        if top_p < 1:
            share = tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            bound, rest = search(
                row, groups, count, size, temperature, bound, high, share, best, unit, True, True, BLOCK
            )
            weight = tl.maximum(weigh(value_of(bound), best, unit), 1)
            num_ties = tl.minimum((rest + weight - 1) // weight, size).to(tl.int32)
            end = end_of_ties(row, groups, count, size, temperature, bound, num_ties, True, BLOCK)
    tl.store(bounds + number, bound)
    tl.store(ends + number, end)


@triton.jit
def noise_words(first, asked, BLOCK: tl.constexpr):
    """Returns the random words, uint32 [BLOCK], of the tokens from `first` (a multiple of 4) on, for a table row."""
    low, high = tl.load(asked + SEED_LOW).to(tl.int64) & 0xFFFFFFFF, tl.load(asked + SEED_HIGH).to(tl.int64)
    counters = first // 4 + tl.arange(0, BLOCK // 4)
    position, sequence_index = tl.load(asked + POSITION), tl.load(asked + SEQUENCE_INDEX)
    words = tl.philox((high << 32) | low, counters, position, sequence_index, 0)
    # One counter gives four words, for four neighbouring tokens.
    return tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))


@triton.jit
def _exponential_noise(words):
    """Turns uniform words into Exp(1), float32: small values, which win the race, keep all their bits."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log1p(-u) without the error of rounding 1 - u: Kahan's quotient.
    rest = 1 - uniform
    return tl.where(rest == 1, uniform, tl.div_rn(uniform * tl.log(rest), rest - 1))


@triton.jit(do_not_specialize=["ends"])
def _race(
    logits, choices, bounds, ends, chunk_values, chunk_ids, scores, winners, size,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds each chunk's token with the largest value minus log noise, or its largest logit at temperature 0."""
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = number * tl.num_programs(1) + chunk
    asked = choices + number * NUM_COLUMNS
    temperature = tl.load(asked + TEMPERATURE).to(tl.float32, bitcast=True)
    bound, end = IMPOSSIBLE + 1 + tl.zeros([], tl.int32), size + tl.zeros([], tl.int32)
    if FILTERED:
        bound, end = tl.load(bounds + number), tl.load(ends + number)
    score, winner = tl.load(chunk_values + place), tl.load(chunk_ids + place)
    if temperature > 0:
        if order_of(tl.div_rn(score, temperature)) >= bound:
            first = chunk * BLOCK
            token_ids = first + tl.arange(0, BLOCK)
            values = tl.div_rn(load_logits(logits + number * size, token_ids, token_ids < size), temperature)
            noise = _exponential_noise(noise_words(first, asked, BLOCK))
            runners = tl.where(passes_bound(values, token_ids, bound, end), values - tl.log(noise), float("-inf"))
            score, winner = tl.max(runners, 0, return_indices=True, return_indices_tie_break_left=True)
            winner += first
        else:
            score = float("-inf")
    tl.store(scores + place, score)
    tl.store(winners + place, winner)


@triton.jit
def _choose(chunk_values, scores, winners, token_ids, num_chunks, CHUNKS: tl.constexpr):
    """Finds the winner of each row among the winners of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    best, _ = load_best(chunk_values, row, num_chunks, CHUNKS)
    _, chunk = load_best(scores, row, num_chunks, CHUNKS)
    winner = tl.load(winners + row * num_chunks + chunk).to(tl.int64)
    tl.store(token_ids + row, tl.where((best > float("-inf")) & (best < float("inf")), winner, -1))


def pack_choices(choices: Choices) -> npt.NDArray[np.int32]:
    """Makes the table of the rows' sampling parameters: int32 [R, 8], see `choose`."""
    words = np.empty((len(choices.temperatures), NUM_COLUMNS.value), np.int32)
    # With torch, as in the reference: numpy's logarithm differs in the last bits.
    log_min_p = torch.from_numpy(np.array(choices.min_p, np.float32)).log_().numpy()
    floats = {TEMPERATURE: choices.temperatures, TOP_P: choices.top_p, LOG_MIN_P: log_min_p}
    integers = {
        TOP_K: np.minimum(choices.top_k, np.iinfo(np.int32).max),
        SEED_LOW: choices.seeds,
        SEED_HIGH: choices.seeds >> 32,
        POSITION: choices.positions,
        SEQUENCE_INDEX: choices.sequence_indexes,
    }
    for column, values in floats.items():
        words[:, column.value] = values.astype(np.float32).view(np.int32)
    for column, values in integers.items():
        words[:, column.value] = values.astype(np.int32)
    return words


def choose(logits: Tensor, table: Tensor | None, *, drawn: bool, filtered: bool) -> Tensor:
    """Launches the choice of a token of each row. The same kernels run for any contents of the table.

    Args:
        logits: float32 [R, vocabulary].
        table: int32 [R, 8] on the device, as `pack_choices` makes it.
        drawn: whether any row may have a temperature above 0; if false, the table may be None.
        filtered: whether any row with a temperature above 0 may have a filter.

    Returns:
        Token ids int64 [R], -1 if the largest logit of a row is infinite.
    """
    num_rows, size = logits.shape
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return token_ids
    options, block = launch_table.SAMPLING.options, launch_table.SAMPLING.block
    num_chunks = triton.cdiv(size, block)
    chunks, places = (num_rows, num_chunks), triton.next_power_of_2(num_chunks)
    maxima = logits.new_empty(num_rows, num_chunks * block // GROUP.value)
    values, ids = logits.new_empty(chunks), logits.new_empty(chunks, dtype=torch.int32)
    _find_best[chunks](logits, maxima, values, ids, size, **options)
    scores, winners = values, ids
    if drawn:
        scores, winners = values.new_empty(chunks), ids.new_empty(chunks)
        bounds = ids.new_empty(2, num_rows)
        if filtered:
            _filter(logits, table, maxima, values, bounds, places)
        _race[chunks](logits, table, *bounds, values, ids, scores, winners, size, filtered, **options)
    _choose[(num_rows,)](values, scores, winners, token_ids, num_chunks, places)
    return token_ids


def _filter(logits: Tensor, table: Tensor, maxima: Tensor, values: Tensor, bounds: Tensor, places: int) -> None:
    """Launches the kernels that find the rows' `bounds`, int32 [2, R]: orders of values, and ends of ids."""
    (num_rows, size), num_chunks, num_groups = logits.shape, values.shape[1], maxima.shape[1]
    masses = values.new_empty(values.shape, dtype=torch.int64)
    groups, num_listed = bounds.new_empty(maxima.shape), bounds.new_empty(num_rows)
    unit, chunk_options = unit_of_weight(size), launch_table.SAMPLING.options
    _weigh_chunks[num_rows, num_chunks](logits, table, values, masses, size, unit, places, **chunk_options)
    options, sizes = launch_table.FILTERS.options, (size, num_chunks, num_groups)
    group_places = triton.next_power_of_2(num_groups)
    _list_groups[(num_rows,)](table, maxima, groups, num_listed, bounds, size, num_groups, group_places, **options)
    arguments = (logits, table, values, masses, groups, num_listed, *bounds, *sizes, unit, places)
    _find_bounds[(num_rows,)](*arguments, **options)


def memory_bytes(num_rows: int, vocab_size: int) -> int:
    """Returns the bytes that `choose` allocates, with its results and the table."""
    num_chunks = triton.cdiv(vocab_size, launch_table.SAMPLING.block)
    num_groups = num_chunks * launch_table.SAMPLING.block // GROUP.value
    # Per chunk: best tokens, winners, masses. Per group: maxima, lists. Per row: table, list length, bounds, token id.
    return num_rows * int(24 * num_chunks + 8 * num_groups + 4 * NUM_COLUMNS.value + 20)
