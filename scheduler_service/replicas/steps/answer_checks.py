"""Checks a worker's answers against their bounds. Does not know what was asked.

A worker may be broken or of another version, or may not be a worker at all. An impossible answer ends its epoch and no
more, as a `WrongAnswer`. The codec checks each value here before it passes it on, so that no other code needs to.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError, Reason
from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from blockyard.contract.scheduling import Adapter
    from blockyard.contract.workers import AvailableBlocks, CacheInfo, LoadedModel, WorkerInfo

# More than any machine has; lists of this size are still made in a second.
MAX_BLOCKS = 2**24
MAX_KV_GROUPS = 256
MAX_BLOCK_SIZE = 2**12
MAX_BLOCK_BYTES = 2**40
# Token ids and positions have 31 bits on every device.
MAX_TOKENS = 2**31 - 1
MAX_WARNINGS = 16
MAX_DECODES = 256
MAX_TARGETS = 1024
# The longest name, digest or description of a device.
MAX_CHARACTERS = 1024
# The next epoch must always be representable.
MAX_EPOCH = 2**63
MAX_SECONDS = 86_400.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WrongAnswer(BlockyardError):
    """A worker gave an impossible answer. That is the worker's fault unless its other answers were right."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.BUG, f"the worker's answer is wrong: {message}")


class AnswerLimits(NamedTuple):
    """The bounds of a step's answer. `max_rows`: the most sequences in a step.

    `max_draft_tokens`, `max_draft_rows`: the most tokens that one sequence and that all of a step draft.
    """

    vocab_size: int
    max_model_len: int
    max_rows: int
    max_draft_tokens: int = 0
    max_draft_rows: int = 0


def require(holds: bool, message: str) -> None:
    """Raises WrongAnswer unless something holds."""
    if not holds:
        raise WrongAnswer(message)


def check_sampled(
    sequence_ids: Sequence[int], token_ids: Sequence[int], num_tokens: Sequence[int], limits: AnswerLimits
) -> None:
    """Checks the columns of sampled tokens. Hot: runs for every answer."""
    if num_tokens:
        _check_runs(sequence_ids, token_ids, num_tokens, limits)
    elif len(sequence_ids) != len(token_ids):
        raise WrongAnswer(f"{len(token_ids)} tokens for {len(sequence_ids)} sequences")
    if token_ids and max(token_ids) >= limits.vocab_size:
        raise WrongAnswer(f"token id {max(token_ids)} is not in the vocabulary of {limits.vocab_size}")


def _check_runs(
    sequence_ids: Sequence[int], token_ids: Sequence[int], num_tokens: Sequence[int], limits: AnswerLimits
) -> None:
    require(
        len(num_tokens) == len(sequence_ids), f"num_tokens: {len(num_tokens)} counts for {len(sequence_ids)} sequences"
    )
    require(sum(num_tokens) == len(token_ids), f"{len(token_ids)} tokens where num_tokens counts {sum(num_tokens)}")
    most = 1 + limits.max_draft_tokens
    require(max(num_tokens) <= most, f"a sequence has {max(num_tokens)} tokens, and it can have at most {most}")


def check_drafts(num_drafted: int, num_accepted: int, limits: AnswerLimits) -> None:
    """Checks how many tokens of a step were drafted, and how many of these were right."""
    if num_drafted or num_accepted:
        holds = num_accepted <= num_drafted <= limits.max_draft_rows
        require(holds, f"{num_accepted} of {num_drafted} drafts were right, and a step has {limits.max_draft_rows}")


def check_sources(total: tuple[int, int], parts: Sequence[tuple[int, int]]) -> None:
    """Checks (drafts, right ones) of some sources against those of all: right ones, and wrong ones."""
    num_right = sum(accepted for _, accepted in parts)
    num_wrong = sum(drafted - accepted for drafted, accepted in parts)
    holds = all(accepted <= drafted for drafted, accepted in parts)
    holds = holds and num_right <= total[1] and num_wrong <= total[0] - total[1]
    require(holds, f"{num_right} and {num_wrong} drafts of some sources were right and wrong, of {total} in all")


def check_turn(epoch: int, step_id: int, due_epoch: int, due_step_id: int) -> None:
    """Raises WrongAnswer for an answer that is not the one that is due."""
    if epoch != due_epoch or step_id != due_step_id:
        raise WrongAnswer(
            f"it answers step {step_id} of epoch {epoch} where step {due_step_id} of epoch {due_epoch} was due"
        )


def check_rows(name: str, rows: Collection[object], limits: AnswerLimits) -> None:
    """Checks that a list is no longer than a step, before the list is read."""
    require(len(rows) <= limits.max_rows, f"{name}: {len(rows)} sequences, and a step has at most {limits.max_rows}")


def check_tokens(name: str, sequence_ids: Sequence[int], limits: AnswerLimits) -> None:
    """Checks that a column has no sequence more often than a sequence has tokens in a step."""
    most = max(Counter(sequence_ids).values(), default=0)
    require(most <= 1 + limits.max_draft_tokens, f"{name}: a sequence appears {most} times")


def check_distinct(name: str, sequence_ids: Sequence[int]) -> None:
    """Checks that no sequence appears twice in a column."""
    require(len(set(sequence_ids)) == len(sequence_ids), f"{name}: a sequence appears twice")


def check_prompt(first_position: int, num_entries: int, limits: AnswerLimits) -> None:
    """Checks the position of a piece of a prompt: the token at 0 has no log probability."""
    holds = 1 <= first_position <= first_position + num_entries <= limits.max_model_len
    require(holds, f"prompt_logprobs: {num_entries} tokens from position {first_position} on, outside any prompt")


def check_pooled(sizes: Sequence[int], num_sequences: int, values: bytes) -> None:
    """Checks the columns of pooled numbers: each sequence has some, of 4 bytes each."""
    require(len(sizes) == num_sequences, f"pooled_sizes: {len(sizes)} sizes for {num_sequences} sequences")
    require(not sizes or min(sizes) > 0, "pooled_sizes: a sequence has no numbers")
    require(4 * sum(sizes) == len(values), f"pooled_values: {len(values)} bytes for {sum(sizes)} numbers")


def check_seconds(seconds: float) -> float:
    require(0 <= seconds <= MAX_SECONDS, f"a step cannot take {seconds:g} s")
    return seconds


def check_worker(worker: WorkerInfo) -> WorkerInfo:
    require(bool(worker.incarnation), "the worker has no incarnation")
    for name in ("worker_id", "incarnation", "api_version", "configuration_digest", "device"):
        _check_text(name, getattr(worker, name))
    _check_text("placement", worker.placement.group)
    require(worker.epoch < MAX_EPOCH, f"epoch {worker.epoch} is too large")
    if worker.group:
        _check_text("problem", worker.group.problem)
        require(worker.group.epoch < MAX_EPOCH, f"the group's epoch {worker.group.epoch} is too large")
    if worker.model:
        check_model(worker.model)
    if worker.cache:
        check_cache(worker.cache)
    for adapter in worker.lora.adapters if worker.lora else ():
        check_adapter(adapter)
    if worker.model and worker.cache:
        fits = worker.cache.max_model_len <= worker.model.max_model_len
        require(fits, f"max_model_len {worker.cache.max_model_len} exceeds the model's {worker.model.max_model_len}")
    return worker


def check_model(model: LoadedModel) -> LoadedModel:
    for name in ("architecture", "model_digest", "weights_digest"):
        _check_text(name, getattr(model, name))
    _check_range("warnings", len(model.warnings), 0, MAX_WARNINGS)
    for warning in model.warnings:
        _check_text("warnings", warning)
    _check_range("vocab_size", model.vocab_size, 1, MAX_TOKENS)
    _check_range("max_model_len", model.max_model_len, 1, MAX_TOKENS)
    return model


def check_adapter(adapter: Adapter) -> Adapter:
    require(adapter.lora_id > 0, "an adapter has no lora_id")
    require(_DIGEST.fullmatch(adapter.digest) is not None, f"adapter {adapter.lora_id} has no digest")
    texts = (adapter.name, adapter.path, *adapter.targets)
    require(
        len(texts) <= MAX_TARGETS and max(map(len, texts)) <= 4 * MAX_CHARACTERS,
        "an adapter has too many targets or too long names",
    )
    _check_range("num_virtual_tokens", adapter.num_virtual_tokens, 0, MAX_VIRTUAL_TOKENS)
    return adapter


def check_blocks(available: AvailableBlocks) -> AvailableBlocks:
    _check_range("block_size", available.block_size, 1, MAX_BLOCK_SIZE)
    _check_range("num_device_blocks", available.num_device_blocks, 0, MAX_BLOCKS)
    _check_range("num_host_blocks", available.num_host_blocks, 0, MAX_BLOCKS)
    _check_range("cache_block_bytes", available.cache_block_bytes, 0, MAX_BLOCK_BYTES)
    _check_windows(available.kv_windows, available.num_state_blocks)
    return available


def check_cache(cache: CacheInfo) -> CacheInfo:
    _check_range("block_size", cache.block_size, 1, MAX_BLOCK_SIZE)
    _check_range("num_device_blocks", cache.num_device_blocks, 2, MAX_BLOCKS)
    _check_range("num_host_blocks", cache.num_host_blocks, 0, MAX_BLOCKS)
    _check_range("cache_block_bytes", cache.cache_block_bytes, 0, MAX_BLOCK_BYTES)
    _check_range("max_model_len", cache.max_model_len, 1, MAX_TOKENS)
    _check_text("determinism_id", cache.determinism_id)
    _check_windows(cache.kv_windows, cache.num_state_blocks)
    _check_decodes(cache.decode_rows, cache.decode_seconds)
    return cache


def _check_decodes(rows: Sequence[int], seconds: Sequence[float]) -> None:
    """Checks the measured steps of decodes: the numbers of rows grow, and each step took some time."""
    _check_range("decode_rows", len(rows), 0, MAX_DECODES)
    require(len(rows) == len(seconds), f"decode_seconds: {len(seconds)} times for {len(rows)} numbers of rows")
    grow = all(one < other for one, other in zip((0, *rows), rows, strict=False))
    require(grow, "decode_rows do not grow")
    require(all(0 < each <= MAX_SECONDS for each in seconds), "decode_seconds: a step cannot take so long")


def _check_windows(windows: Sequence[int], num_state_blocks: int) -> None:
    _check_range("num_state_blocks", num_state_blocks, 0, MAX_BLOCKS)
    _check_range("kv_windows", len(windows), 0 if num_state_blocks else 1, MAX_KV_GROUPS)
    _check_range("kv_windows", max(windows, default=0), 0, MAX_TOKENS)


def _check_range(name: str, number: int, low: int, high: int) -> None:
    require(low <= number <= high, f"{name} {number} is not from {low} to {high}")


def _check_text(name: str, text: str) -> None:
    require(len(text) <= MAX_CHARACTERS, f"{name} has {len(text)} characters")
