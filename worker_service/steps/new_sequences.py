"""Checks each new sequence of a step by itself. Knows neither the step's other rows nor the owners of blocks.

A sequence whose own fields are wrong is rejected: it keeps its row, which computes nothing, and fails alone. What other
rows depend on is no matter of this module: numbers of sequences and blocks are checked with the step (`validation`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from blockyard.contract.pooling import PoolingKind
from blockyard.contract.sampling import NUMBERS, SamplingParams
from blockyard.errors import Violation, invalid
from blockyard.lora.virtual_tokens import virtual_ids
from blockyard.telemetry import EventLogger
from worker_service.lora.slots import AdapterSlots
from worker_service.step import MAX_BEAMS, MAX_LOGPROBS, MAX_VIOLATIONS, NewRow, Step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from blockyard.contract.sampling import ThinkingTokens
    from worker_service.batch.rows import BatchLimits

log = EventLogger(__name__)

# A checkpoint may name ends that its vocabulary does not have.
_MAX_FOREIGN_STOPS = 64

NO_SLOTS = AdapterSlots()
MAX_LABEL_TOKENS = 128
# These kinds need all rows of a prompt, so the whole prompt must be computed.
_OF_ALL_ROWS = (PoolingKind.MEAN, PoolingKind.TOKENS, PoolingKind.FIRST)


def reject_wrong(step: Step, limits: BatchLimits, slots: AdapterSlots = NO_SLOTS) -> Step:
    """Returns the step with every new sequence rejected whose own fields are invalid."""
    if not step.new_sequences:
        return step
    # To bring an unknown adapter into a slot is wrong for the whole step.
    activated = frozenset(step.activated_lora_ids.tolist())
    checked = tuple(_check(new, limits, slots, activated) for new in step.new_sequences)
    return replace(step, new_sequences=checked)


def _check(new: NewRow, limits: BatchLimits, slots: AdapterSlots, activated: Collection[int]) -> NewRow:
    error = new.rejection
    if error is None:
        found = chain(
            _wrong_tokens(new, limits),
            _wrong_request(new, limits.vocab_size),
            _wrong_pooling(new, limits) if new.pooling or limits.rule else (),
            _wrong_lora(new, slots, activated) if new.lora_id else (),
        )
        violations = [Violation(field, description) for field, description in islice(found, MAX_VIOLATIONS)]
        if not violations:
            return new
        error = invalid(violations)
    log.warning("a sequence was rejected", sequence_id=new.sequence_id, request_id=new.request_id, reason=error.message)
    return new.reject(error)


def _wrong_tokens(new: NewRow, limits: BatchLimits) -> Iterator[tuple[str, str]]:
    num_tokens = len(new.token_ids)
    if not 1 <= num_tokens <= limits.max_model_len:
        yield "token_ids", f"{num_tokens} ids where 1 to {limits.max_model_len} fit"
    elif new.token_ids[new.num_virtual_tokens :].max(initial=0) >= limits.vocab_size:
        yield "token_ids", f"token ids must be below {limits.vocab_size}"
    if not 1 <= new.prompt_length <= num_tokens:
        yield "prompt_length", f"{new.prompt_length} of {num_tokens} tokens"
    if new.num_computed_tokens >= max(num_tokens, 1):
        yield "num_computed_tokens", "the last token known has to be computed"


def _wrong_request(new: NewRow, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yields parameters that would break the sampler: (field, description). The gateway has checked clients' limits."""
    num_stop_ids = len(new.stop_token_ids)
    if num_stop_ids > vocab_size + _MAX_FOREIGN_STOPS:
        yield "stop_token_ids", f"{num_stop_ids} ids of a vocabulary of {vocab_size}"
    most = MAX_BEAMS * max(2, 1 + num_stop_ids)
    if new.num_beam_candidates > most:
        yield "num_beam_candidates", f"{new.num_beam_candidates}, at most {most} are allowed"
    if not new.has_sampling and new.pooling is None:
        yield "sampling", "must be set"
    for field, description in wrong_sampling(new.sampling, vocab_size):
        yield f"sampling.{field}", description


def wrong_sampling(sampling: SamplingParams, vocab_size: int) -> Iterable[tuple[str, str]]:
    """Yields sampling parameters that would break the sampler: (field, description)."""
    for name, number in NUMBERS.items():
        value = sampling.value(name)
        if not number.holds(value):
            yield name, f"must be {number.description}, not {value:g}"
    for token_id, bias in sampling.logit_bias.items():
        if token_id >= vocab_size or not math.isfinite(bias):
            yield "logit_bias", f"{bias} for token id {token_id} of {vocab_size}"
    for name in ("allowed_token_ids", "predicted_token_ids"):
        if max(getattr(sampling, name), default=0) >= vocab_size:
            yield name, f"token ids must be below {vocab_size}"
    if not all(sampling.bad_token_sequences):
        yield "bad_token_sequences", "none may be empty"
    elif max(map(max, sampling.bad_token_sequences), default=0) >= vocab_size:
        yield "bad_token_sequences", f"token ids must be below {vocab_size}"
    if sampling.thinking_tokens is not None:
        yield from _wrong_thinking(sampling.thinking_tokens, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(sampling, name)
        if asked is not None and asked > MAX_LOGPROBS:
            yield name, f"{asked} is more than {MAX_LOGPROBS}"


def _wrong_thinking(tokens: ThinkingTokens, vocab_size: int) -> Iterator[tuple[str, str]]:
    if not all(tokens.begins):
        yield "thinking_tokens.begins", "none may be empty"
    elif max(tokens.end_token_id, max(map(max, tokens.begins), default=0)) >= vocab_size:
        yield "thinking_tokens", f"token ids must be below {vocab_size}"


def _wrong_lora(new: NewRow, slots: AdapterSlots, activated: Collection[int]) -> Iterator[tuple[str, str]]:
    if not new.lora_id:
        return
    if slots.knows(new.lora_id):
        expected = virtual_ids(slots.num_virtual_tokens(new.lora_id))
        first = new.token_ids[: len(expected)]
        if new.num_virtual_tokens != len(expected) or not np.array_equal(first, expected):
            yield "token_ids", f"must begin with the {len(expected)} virtual tokens of adapter {new.lora_id}"
        elif new.prompt_length < len(expected):
            yield "token_ids", f"the prompt is shorter than the {len(expected)} virtual tokens before it"
    elif new.lora_id not in activated:
        yield "lora_id", f"adapter {new.lora_id} is not in the cache"


def _wrong_pooling(sequence: NewRow, limits: BatchLimits) -> Iterator[tuple[str, str]]:
    """Yields the faults of a sequence's pooling parameters: (field, description)."""
    pooling, rule = sequence.pooling, limits.rule
    if pooling is None or rule is None:
        if pooling is not None:
            yield "pooling", "this model was loaded to generate"
        elif rule is not None:
            yield "pooling", f"must be set: this model was loaded to {rule.task}"
        return
    if pooling.kind not in rule.kinds:
        yield "pooling.kind", f"a model that was loaded to {rule.task} makes {', '.join(sorted(rule.kinds))}"
        return
    ids = pooling.label_token_ids
    least, most = (1, MAX_LABEL_TOKENS) if pooling.kind is PoolingKind.LABEL_LOGITS else (0, 0)
    if not least <= len(ids) <= most:
        yield "pooling.label_token_ids", f"{len(ids)} ids, where {least} to {most} are allowed"
    if sequence.sampling.prompt_logprobs is not None:
        yield "sampling.prompt_logprobs", "must be absent beside pooling"
    if max(ids, default=0) >= limits.vocab_size:
        yield "pooling.label_token_ids", f"token ids must be below {limits.vocab_size}"
    if pooling.second_from and (limits.num_token_types < 2 or pooling.second_from >= len(sequence.token_ids)):
        yield "pooling.second_from", "behind the last token, or the network has no token types"
    width = rule.width or limits.pooled_width
    if pooling.dimensions > width:
        yield "pooling.dimensions", f"{pooling.dimensions} is more than the {width} numbers of a row"
    if sequence.prompt_length != len(sequence.token_ids) or sequence.num_beam_candidates:
        yield "pooling", "must be absent from a sequence that has output, or is a beam"
    rows = rule.rows if pooling.kind is PoolingKind.CLASSIFY else pooling.kind
    if (rows in _OF_ALL_ROWS or limits.whole_prompts) and sequence.num_computed_tokens:
        yield "num_computed_tokens", f"must be 0, not {sequence.num_computed_tokens}: {rows} needs all rows"
