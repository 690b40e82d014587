"""The messages that the public API and the scheduler's have in common into values and back."""

from __future__ import annotations

from blockyard.common.v1 import sampling_pb2
from gateway.request import BeamOptions, EarlyStopping, FinishReason, SamplingOptions

REASON_NUMBERS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
}
_REASONS: dict[int, FinishReason] = {number: reason for reason, number in REASON_NUMBERS.items()}
_EARLY_STOPPING_NUMBERS = {
    EarlyStopping.HEURISTIC: sampling_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: sampling_pb2.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: sampling_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING = {number: value for value, number in _EARLY_STOPPING_NUMBERS.items()}
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
    return _REASONS.get(number, FinishReason.ERROR)


def decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingOptions:
    """Reads sampling parameters; those that are absent become None or empty."""
    given = {name: getattr(message, name) for name in _NUMBERS if message.HasField(name)}
    return SamplingOptions(
        **given,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids[:]),
        bad_words=tuple(message.bad_words),
        bad_token_sequences=tuple(tuple(sequence.token_ids[:]) for sequence in message.bad_token_sequences),
    )


def encode_sampling(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Writes sampling parameters."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(options, name) for name in _NUMBERS},
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
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
        early_stopping=_EARLY_STOPPING.get(message.early_stopping, EarlyStopping.HEURISTIC),
    )


def encode_beams(options: BeamOptions) -> sampling_pb2.BeamSearch:
    """Writes a beam search."""
    return sampling_pb2.BeamSearch(
        width=options.width,
        length_penalty=options.length_penalty,
        early_stopping=_EARLY_STOPPING_NUMBERS[options.early_stopping],
    )
