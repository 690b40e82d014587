"""Decodes and encodes the messages that the public API and the scheduler's share."""

from __future__ import annotations

from blockyard.common.v1 import sampling_pb2
from gateway.request import BeamOptions, EarlyStopping, FinishReason, SamplingOptions

# What this version knows: a later one may send other numbers.
_REASONS = frozenset(FinishReason)
_EARLY_STOPPING = frozenset(EarlyStopping)
_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)


def decode_reason(number: int) -> FinishReason:
    """Reads why a sequence ended; a reason that is not known here is an ERROR."""
    return FinishReason(number) if number in _REASONS else FinishReason.ERROR


def encode_reason(reason: FinishReason) -> sampling_pb2.FinishReason.ValueType:
    """Writes why a sequence ended."""
    return sampling_pb2.FinishReason.ValueType(reason)


def decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingOptions:
    """Reads sampling parameters; those that are absent become None or empty."""
    given = {name: getattr(message, name) for name in _NUMBERS if message.HasField(name)}
    return SamplingOptions(
        **given,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids[:]),
        grammar=message.grammar,
        bad_words=tuple(message.bad_words),
        bad_token_sequences=tuple(tuple(sequence.token_ids[:]) for sequence in message.bad_token_sequences),
    )


def encode_sampling(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Writes sampling parameters."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(options, name) for name in _NUMBERS},
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
        grammar=options.grammar,
        bad_words=options.bad_words,
        bad_token_sequences=[
            sampling_pb2.TokenSequence(token_ids=token_ids) for token_ids in options.bad_token_sequences
        ],
    )


def decode_beams(message: sampling_pb2.BeamSearch) -> BeamOptions:
    """Reads a beam search."""
    return BeamOptions(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=(
            EarlyStopping(message.early_stopping)
            if message.early_stopping in _EARLY_STOPPING
            else EarlyStopping.HEURISTIC
        ),
    )


def encode_beams(options: BeamOptions) -> sampling_pb2.BeamSearch:
    """Writes a beam search."""
    return sampling_pb2.BeamSearch(
        width=options.width,
        length_penalty=options.length_penalty,
        early_stopping=sampling_pb2.EarlyStopping.ValueType(options.early_stopping),
    )
