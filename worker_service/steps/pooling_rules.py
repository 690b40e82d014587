"""Rules of sequences that are pooled. Knows no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.pooling import PoolingKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_service.batch.input_batch import BatchLimits
    from worker_service.step import NewRow

MAX_LABEL_TOKENS = 128
# These need rows before the last piece's too: all of a prompt is computed.
_OF_ALL_ROWS = (PoolingKind.MEAN, PoolingKind.TOKENS, PoolingKind.FIRST)


def wrong_pooling(sequence: NewRow, limits: BatchLimits) -> Iterator[tuple[str, str]]:
    """Finds what is wrong with what a sequence asks to be made of it: (field, description)."""
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
