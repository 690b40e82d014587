"""Encodes and decodes sampling parameters, stop criteria, beam searches, finish reasons and log probabilities.

Gateway and scheduler keep the log probabilities of each token beside it; a message between them, and a worker's answer,
holds columns of many.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.messages import EnumCodec
from blockyard.contract.sampling import (
    NUMBERS,
    BeamSearch,
    Candidates,
    EarlyStopping,
    FinishReason,
    PredictionUsage,
    PromptPiece,
    SamplingParams,
    StopCriteria,
    ThinkingTokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_REASONS = EnumCodec(FinishReason, sampling_pb2.FinishReason.items(), "FINISH_REASON_")
EARLY_STOPPING = EnumCodec(
    EarlyStopping, sampling_pb2.EarlyStopping.items(), "EARLY_STOPPING_", zero=EarlyStopping.HEURISTIC
)
_OPTIONAL: tuple[Any, ...] = (*NUMBERS, "seed", "logprobs", "prompt_logprobs", "thinking_token_budget", "speculation")


def encode_reason(reason: FinishReason | None) -> sampling_pb2.FinishReason.ValueType:
    """Encodes why a sequence ended; None: it has not."""
    return _REASONS.encode(reason) if reason else sampling_pb2.FINISH_REASON_UNSPECIFIED


def decode_reason(number: int) -> FinishReason | None:
    """Decodes why a sequence ended; None: it has not. A reason of a later version is an ERROR."""
    return (_REASONS.find(number) or FinishReason.ERROR) if number else None


def encode_sampling(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Encodes sampling parameters; None is left out."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _OPTIONAL},
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        grammar=params.grammar,
        bad_words=params.bad_words,
        bad_token_sequences=_encode_sequences(params.bad_token_sequences),
        thinking_tokens=_encode_thinking(params.thinking_tokens) if params.thinking_tokens else None,
        predicted_token_ids=params.predicted_token_ids,
    )


def decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Decodes sampling parameters; what is absent becomes None or empty."""
    return SamplingParams(
        **{name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)},
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids[:]),
        grammar=message.grammar,
        bad_words=tuple(message.bad_words),
        bad_token_sequences=_decode_sequences(message.bad_token_sequences),
        thinking_tokens=_decode_thinking(message.thinking_tokens) if message.HasField("thinking_tokens") else None,
        predicted_token_ids=tuple(message.predicted_token_ids[:]),
    )


def encode_prediction(prediction: PredictionUsage) -> sampling_pb2.PredictionUsage:
    return sampling_pb2.PredictionUsage(**prediction._asdict())


def decode_prediction(message: sampling_pb2.PredictionUsage) -> PredictionUsage:
    return PredictionUsage(message.num_accepted_tokens, message.num_rejected_tokens)


def _encode_sequences(sequences: Iterable[Iterable[int]]) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(token_ids=ids) for ids in sequences]


def _decode_sequences(messages: Iterable[sampling_pb2.TokenSequence]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sequence.token_ids[:]) for sequence in messages)


def _encode_thinking(tokens: ThinkingTokens) -> sampling_pb2.ThinkingTokens:
    return sampling_pb2.ThinkingTokens(
        end_token_id=tokens.end_token_id,
        begins=_encode_sequences(tokens.begins),
        is_open=tokens.is_open,
        begins_anywhere=tokens.begins_anywhere,
    )


def _decode_thinking(message: sampling_pb2.ThinkingTokens) -> ThinkingTokens:
    return ThinkingTokens(
        message.end_token_id, _decode_sequences(message.begins), message.is_open, message.begins_anywhere
    )


def encode_beams(search: BeamSearch) -> sampling_pb2.BeamSearch:
    return sampling_pb2.BeamSearch(
        width=search.width,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING.encode(search.early_stopping),
    )


def decode_beams(message: sampling_pb2.BeamSearch) -> BeamSearch:
    """Decodes a beam search; an early stopping of a later version is HEURISTIC."""
    return BeamSearch(
        message.width,
        message.length_penalty if message.HasField("length_penalty") else 1.0,
        EARLY_STOPPING.decode(message.early_stopping),
    )


def encode_stop(stop: StopCriteria) -> sampling_pb2.StopCriteria:
    return sampling_pb2.StopCriteria(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_strings=stop.stop_strings,
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
        include_stop_in_output=stop.include_stop_in_output,
    )


def decode_stop(message: sampling_pb2.StopCriteria) -> StopCriteria:
    return StopCriteria(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids[:]),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def split_logprobs(message: sampling_pb2.Logprobs) -> list[Candidates]:
    """Splits columns into one entry for each token."""
    token_ids, logprobs, ranks = message.token_ids[:], message.logprobs[:], message.ranks[:]
    entries: list[Candidates] = []
    start = 0
    for count in message.num_candidates:
        end = start + count
        entries.append(Candidates(token_ids[start:end], logprobs[start:end], ranks[start:end]))
        start = end
    return entries


def join_logprobs(entries: Iterable[Candidates]) -> sampling_pb2.Logprobs:
    """Joins entries to columns."""
    rows = list(entries)
    return sampling_pb2.Logprobs(
        num_candidates=[len(entry.token_ids) for entry in rows],
        token_ids=itertools.chain.from_iterable(entry.token_ids for entry in rows),
        logprobs=itertools.chain.from_iterable(entry.logprobs for entry in rows),
        ranks=itertools.chain.from_iterable(entry.ranks for entry in rows),
    )


def split_prompt_logprobs(message: sampling_pb2.PromptLogprobs) -> PromptPiece:
    """Decodes the log probabilities of a piece of a prompt."""
    return PromptPiece(message.first_position, split_logprobs(message.logprobs))


def encode_prompt_logprobs(sequence_id: int, piece: PromptPiece) -> sampling_pb2.PromptLogprobs:
    """Encodes the log probabilities of a piece of a sequence's prompt."""
    return sampling_pb2.PromptLogprobs(
        sequence_id=sequence_id, first_position=piece.first_position, logprobs=join_logprobs(piece.candidates)
    )
