"""Checks requests against one table of rules, lists all violations at once, and fills in defaults.

Ranges and defaults follow vLLM's SamplingParams, with three exceptions: a top_k below 0 is an error instead of "off"; n
may be above 1 with temperature 0 (the sequences are then equal); a logit bias out of range is an error instead of being
clamped. A beam search does not sample: temperature, top_p, top_k, min_p and seed are checked but have no effect on it,
as in transformers. Knows no messages.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.contract.request import OnUpdate
from blockyard.contract.sampling import MAX_FLOAT32, NUMBERS, Range
from blockyard.contract.scheduling import Submission
from blockyard.errors import Reason, Violation, quote
from gateway.request import MAX_SALT_CHARACTERS, REQUEST_ID_RULE, is_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blockyard.contract.sampling import SamplingParams
    from gateway.request import GenerationRequest

MAX_N = 64
MAX_STOP_STRINGS = 16
# A longer stop string would hold back more text, and its automaton would take more memory.
MAX_STOP_STRING_CHARACTERS = 1024
# The worker checks each bad word for each token.
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_SEQUENCE_TOKENS = 256
# Checking more entries would block the event loop too long.
MAX_LOGIT_BIASES = 4096
MAX_LOGPROBS = 20
MIN_BEAM_WIDTH, MAX_BEAM_WIDTH = 2, 32
# For each stop token, every beam proposes as many further tokens as there are beams.
MAX_BEAM_STOP_IDS = 32
# The largest protobuf Duration, in seconds.
_MAX_SECONDS = 315_576_000_000
_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1
_MAX_LISTED_IDS = 8


class ModelLimits(NamedTuple):
    """The limits of a model. `name`: the name of the model, or of the adapter that the request names.

    `max_num_seqs`: the most sequences or beams that run at once; 0: unknown. `served`: the names of all models here.
    """

    name: str
    vocab_size: int
    max_model_len: int
    end_token_ids: frozenset[int]
    max_num_seqs: int = 0
    served: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Rule:
    """The range of a number in a request. A missing number is always valid.

    `is_duration`: whether it is sent as a Duration, in nanoseconds; other fractions are sent as float32.
    """

    field: str
    read: Callable[[GenerationRequest], float | None]
    range: Range
    is_duration: bool = False

    def violations(self, request: GenerationRequest) -> Iterator[Violation]:
        value = self.read(request)
        if value is None:
            return
        number = value if isinstance(value, int) else self._as_sent(value)
        if not self.range.holds(number):
            # Show only the digits of a float32, so that 1.01 from gRPC is shown as 1.01.
            given = value if isinstance(value, int) else f"{number:.7g}"
            yield Violation(self.field, f"must be {self.range.description}, not {given}")

    def _as_sent(self, value: float) -> float:
        return round(value, 9) if self.is_duration else as_float32(value)


def _sampling_rule(name: str, bounds: Range) -> _Rule:
    return _Rule(f"sampling.{name}", lambda request: getattr(request.sampling, name), bounds)


_LOGPROBS = Range(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")
_QUEUE_SECONDS = Range(0, _MAX_SECONDS, f"above 0 and at most {_MAX_SECONDS} seconds", low_is_open=True)
_BEAM_WIDTH = Range(MIN_BEAM_WIDTH, MAX_BEAM_WIDTH, f"from {MIN_BEAM_WIDTH} to {MAX_BEAM_WIDTH}")
_FINITE = Range(-MAX_FLOAT32, MAX_FLOAT32, "a finite number")
RULES = (
    _Rule("n", lambda r: r.n, Range(1, MAX_N, f"from 1 to {MAX_N}")),
    *(_sampling_rule(name, number) for name, number in NUMBERS.items()),
    _sampling_rule("seed", Range(0, _MAX_UINT64, "from 0 to 2^64 - 1")),
    _sampling_rule("logprobs", _LOGPROBS),
    _sampling_rule("thinking_token_budget", Range(0, _MAX_UINT32, "from 0 to 2^32 - 1")),
    _sampling_rule("prompt_logprobs", _LOGPROBS),
    _Rule("stop.max_tokens", lambda r: r.stop.max_tokens, Range(1, _MAX_UINT32, "at least 1")),
    _Rule("stop.min_tokens", lambda r: r.stop.min_tokens, Range(0, _MAX_UINT32, "at least 0")),
    _Rule("priority", lambda r: r.priority, Range(-_MAX_INT32 - 1, _MAX_INT32, "from -2^31 to 2^31 - 1")),
    _Rule("max_queue_time", lambda r: r.max_queue_seconds, _QUEUE_SECONDS, is_duration=True),
    _Rule("beam_search.width", lambda r: r.beam_search and r.beam_search.width, _BEAM_WIDTH),
    _Rule("beam_search.length_penalty", lambda r: r.beam_search and r.beam_search.length_penalty, _FINITE),
)


def as_float32(value: float) -> float:
    """Rounds to the float32 that is sent to the scheduler, so that a number which becomes 0 or infinite is noticed."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def find_violations(
    request: GenerationRequest,
    prompt_token_ids: Sequence[int] | None,
    limits: ModelLimits,
    *,
    bad_word_ids: Sequence[tuple[int, ...]] = (),
) -> list[Violation]:
    """Lists all violations of a request.

    Args:
        request: the request as received.
        prompt_token_ids: the ids of the prompt; None if it could not be tokenized, which is already reported.
        limits: the model's limits.
        bad_word_ids: the token sequences of the bad words.
    """
    return [
        *_identity(request, limits),
        *(() if prompt_token_ids is None else _prompt(request, prompt_token_ids, limits)),
        *_truncation(request),
        *(violation for rule in RULES for violation in rule.violations(request)),
        *_logit_bias(request, limits),
        *_bad_words(request, limits),
        *_allowed_token_ids(request, bad_word_ids, limits),
        *_predicted_token_ids(request, limits),
        *_stop(request, limits),
        *_length(request, len(prompt_token_ids or ()), limits),
        *_thinking(request),
        *_beams(request),
        *_rows(request, limits),
    ]


def _identity(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    if request.model not in ("", limits.name):
        yield unknown_model(request.model, limits.served or (limits.name,))
    if request.request_id and not is_request_id(request.request_id):
        yield Violation("request_id", REQUEST_ID_RULE)
    if (length := len(request.cache_salt)) > MAX_SALT_CHARACTERS:
        yield Violation("cache_salt", f"must have at most {MAX_SALT_CHARACTERS} characters, not {length}")


def unknown_model(name: str, served: Sequence[str]) -> Violation:
    """Returns the violation for a model that is not served. `served`: the names of the models that are."""
    listed = ", ".join(map(repr, served))
    return Violation(
        "model", f"{quote(name)} is not served; {listed} {'is' if len(served) == 1 else 'are'}", Reason.MODEL_NOT_FOUND
    )


def _prompt(request: GenerationRequest, token_ids: Sequence[int], limits: ModelLimits) -> Iterator[Violation]:
    if not request.prompt or not token_ids:
        yield Violation("prompt", "must not be empty; to start from nothing, give the begin token's id")
    elif len(token_ids) >= limits.max_model_len:
        yield prompt_too_long(f"has {len(token_ids)} tokens", limits.max_model_len)
    yield from find_foreign_ids("prompt", token_ids, limits.vocab_size)


def prompt_too_long(size: str, max_model_len: int) -> Violation:
    """Returns the violation for a prompt that leaves no room for an answer. `size`: the description's beginning."""
    description = f"{size}. {length_limit(max_model_len)}, so a prompt has at most {max_model_len - 1}"
    return Violation("prompt", description, Reason.PROMPT_TOO_LONG)


def size_of(num_characters: int, min_tokens: int) -> str:
    """Describes the size of a text that was not encoded completely."""
    return f"has {num_characters} characters, which are at least {min_tokens} tokens"


def length_limit(max_model_len: int) -> str:
    """Describes the model's length in OpenAI's words, which client libraries look for."""
    return f"This model's maximum context length is {max_model_len} tokens, of prompt and answer together"


def _truncation(request: GenerationRequest) -> Iterator[Violation]:
    limit = request.truncate_prompt_tokens
    if limit is not None and limit != -1 and limit < 1:
        yield Violation("truncate_prompt_tokens", f"must be at least 1, or -1 for as many as fit, not {limit}")


def find_foreign_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    """Yields a violation if a field has token ids outside of the model's vocabulary."""
    foreign = [i for i in token_ids if not 0 <= i < vocab_size]
    if foreign:
        listed = ", ".join(str(i) for i in foreign[:_MAX_LISTED_IDS]) + (
            ", …" if len(foreign) > _MAX_LISTED_IDS else ""
        )
        yield Violation(field, f"token ids must be from 0 to {vocab_size - 1}, not {listed}")


def _logit_bias(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    bias = request.sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIASES:
        yield Violation("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIASES} entries, not {len(bias)}")
        return
    yield from find_foreign_ids("sampling.logit_bias", tuple(bias), limits.vocab_size)
    outside = [i for i, value in bias.items() if not -100 <= value <= 100]
    if outside:
        listed = ", ".join(str(i) for i in outside[:_MAX_LISTED_IDS])
        yield Violation("sampling.logit_bias", f"values must be from -100 to 100; not so for token ids {listed}")


def _bad_words(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    words, sequences = request.sampling.bad_words, request.sampling.bad_token_sequences
    for field, given in (("sampling.bad_words", words), ("sampling.bad_token_sequences", sequences)):
        if len(given) > MAX_BAD_WORDS:
            yield Violation(field, f"must have at most {MAX_BAD_WORDS} entries, not {len(given)}")
        if not all(given):
            yield Violation(field, "must not have empty entries")
    if any(len(word) > MAX_BAD_WORD_CHARACTERS for word in words):
        yield Violation("sampling.bad_words", f"must be at most {MAX_BAD_WORD_CHARACTERS} characters each")
    if any(len(sequence) > MAX_BAD_SEQUENCE_TOKENS for sequence in sequences):
        yield Violation("sampling.bad_token_sequences", f"must be at most {MAX_BAD_SEQUENCE_TOKENS} tokens each")
    yield from find_foreign_ids("sampling.bad_token_sequences", tuple(itertools.chain(*sequences)), limits.vocab_size)


def _allowed_token_ids(
    request: GenerationRequest, bad_word_ids: Sequence[tuple[int, ...]], limits: ModelLimits
) -> Iterator[Violation]:
    allowed = request.sampling.allowed_token_ids
    yield from find_foreign_ids("sampling.allowed_token_ids", allowed, limits.vocab_size)
    bad = {sequence for sequence in (*request.sampling.bad_token_sequences, *bad_word_ids) if len(sequence) == 1}
    if allowed and all((token_id,) in bad for token_id in allowed):
        yield Violation("sampling.allowed_token_ids", "must allow a token that bad_words does not forbid")


def _predicted_token_ids(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    field, predicted = "sampling.predicted_token_ids", request.sampling.predicted_token_ids
    if len(predicted) > limits.max_model_len:
        yield Violation(field, f"must have at most {limits.max_model_len} ids, not {len(predicted)}")
    yield from find_foreign_ids(field, predicted, limits.vocab_size)


def _thinking(request: GenerationRequest) -> Iterator[Violation]:
    if request.sampling.thinking_token_budget is None:
        return
    if request.beam_search is not None:
        description = "is not supported with a beam search"
        yield Violation("sampling.thinking_token_budget", description, Reason.UNSUPPORTED_PARAMETER)
    if request.sampling.grammar:
        description = "is not supported with sampling.grammar, which constrains reasoning, too: use format"
        yield Violation("sampling.thinking_token_budget", description, Reason.UNSUPPORTED_PARAMETER)


def _beams(request: GenerationRequest) -> Iterator[Violation]:
    if request.beam_search is None:
        return
    if request.n > request.beam_search.width >= MIN_BEAM_WIDTH:
        description = f"must be at most the width of the beam search, {request.beam_search.width}, not {request.n}"
        yield Violation("n", description)
    if request.stop.stop_strings:
        description = "is not supported with a beam search, whose text is known only at its end: use stop_token_ids"
        yield Violation("stop.stop_strings", description, Reason.UNSUPPORTED_PARAMETER)
    if len(request.stop.stop_token_ids) > MAX_BEAM_STOP_IDS:
        description = (
            f"must have at most {MAX_BEAM_STOP_IDS} entries with a beam search, not {len(request.stop.stop_token_ids)}"
        )
        yield Violation("stop.stop_token_ids", description)
    if request.sampling.logprobs is not None:
        description = "is not supported with a beam search: each of its answers has a score instead"
        yield Violation("sampling.logprobs", description, Reason.UNSUPPORTED_PARAMETER)


def _rows(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    field, count, highest = "n", request.n, MAX_N
    if request.beam_search is not None:
        field, count, highest = "beam_search.width", request.beam_search.width, MAX_BEAM_WIDTH
    # A number out of its range was already reported.
    if 0 < limits.max_num_seqs < count <= highest:
        description = (
            f"must be at most {limits.max_num_seqs}, the sequences that the scheduler runs at once, not {count}"
        )
        yield Violation(field, description)


def _stop(request: GenerationRequest, limits: ModelLimits) -> Iterator[Violation]:
    strings = request.stop.stop_strings
    if len(strings) > MAX_STOP_STRINGS:
        yield Violation("stop.stop_strings", f"must have at most {MAX_STOP_STRINGS} entries, not {len(strings)}")
    if not all(strings):
        yield Violation("stop.stop_strings", "must not be empty strings")
    if any(len(string) > MAX_STOP_STRING_CHARACTERS for string in strings):
        yield Violation("stop.stop_strings", f"must be at most {MAX_STOP_STRING_CHARACTERS} characters each")
    yield from find_foreign_ids("stop.stop_token_ids", request.stop.stop_token_ids, limits.vocab_size)


def _length(request: GenerationRequest, num_prompt_tokens: int, limits: ModelLimits) -> Iterator[Violation]:
    room = limits.max_model_len - num_prompt_tokens
    max_tokens, min_tokens = request.stop.max_tokens, request.stop.min_tokens
    if max_tokens is not None and room > 0 and max_tokens > room:
        # If a shorter prompt would leave enough room, use the reason at which clients shorten the prompt.
        is_served_alone = max_tokens < limits.max_model_len
        yield Violation(
            "stop.max_tokens",
            f"is {max_tokens} behind a prompt of {num_prompt_tokens} tokens. {length_limit(limits.max_model_len)}, so "
            f"{room} fit",
            Reason.PROMPT_TOO_LONG if is_served_alone else Reason.FIELD_INVALID,
        )
    if min_tokens is None:
        return
    if max_tokens is not None and min_tokens > max_tokens:
        yield Violation("stop.min_tokens", f"must be at most max_tokens, {max_tokens}, not {min_tokens}")
    elif max_tokens is None and 0 < room < min_tokens:
        yield Violation(
            "stop.min_tokens", f"must be at most {room}, which is the room after the prompt, not {min_tokens}"
        )


def derive_seed(gateway_seed: int, request_id: str, *, tenant: str = "") -> int:
    """Derives a request's seed: 64 bits of the SHA-256 of the gateway's seed, the tenant and the request's id."""
    key = f"{gateway_seed}\0{tenant}\0{request_id}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little")


def complete(
    request: GenerationRequest,
    prompt_token_ids: Sequence[int],
    limits: ModelLimits,
    *,
    generation_defaults: Mapping[str, float],
    gateway_seed: int,
    bad_word_ids: Sequence[tuple[int, ...]] = (),
    grammar: str = "",
) -> Submission:
    """Makes the submission of a valid request, with all defaults filled in.

    Args:
        request: a request without violations.
        prompt_token_ids: the ids of the prompt.
        limits: the model's limits.
        generation_defaults: the model's defaults for numbers that the request does not set; then neutral values apply.
        gateway_seed: the seed from which the seed of a request without one is derived.
        bad_word_ids: the token sequences of the bad words, which join the bad token sequences.
        grammar: the grammar that constrains the answer; empty: none.
    """
    room = limits.max_model_len - len(prompt_token_ids)
    end_token_ids = frozenset[int]() if request.stop.ignore_eos else limits.end_token_ids
    return Submission(
        request_id=request.request_id,
        prompt_token_ids=array("I", prompt_token_ids),
        n=request.n,
        sampling=replace(_complete_sampling(request, generation_defaults, gateway_seed, bad_word_ids), grammar=grammar),
        max_tokens=room if request.stop.max_tokens is None else request.stop.max_tokens,
        min_tokens=request.stop.min_tokens or 0,
        stop_token_ids=tuple(sorted(end_token_ids.union(request.stop.stop_token_ids))),
        tenant=request.tenant,
        priority=request.priority,
        max_queue_seconds=request.max_queue_seconds,
        remaining_seconds=request.remaining_seconds,
        beam_search=request.beam_search,
        fails_on_update=request.on_update is OnUpdate.FAIL,
    )


def _complete_sampling(
    request: GenerationRequest,
    generation_defaults: Mapping[str, float],
    gateway_seed: int,
    bad_word_ids: Sequence[tuple[int, ...]],
) -> SamplingParams:
    own = request.sampling
    defaults = {name: generation_defaults.get(name, number.neutral) for name, number in NUMBERS.items()}
    silent: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(own, name) is None}
    seed = derive_seed(gateway_seed, request.request_id, tenant=request.tenant) if own.seed is None else own.seed
    return replace(
        own,
        **silent,
        seed=seed,
        # A client may repeat an id a million times.
        allowed_token_ids=tuple(dict.fromkeys(own.allowed_token_ids)),
        bad_words=(),
        # Without a budget the gateway has not set them.
        thinking_tokens=None if own.thinking_token_budget is None else own.thinking_tokens,
        bad_token_sequences=tuple(dict.fromkeys((*own.bad_token_sequences, *bad_word_ids))),
    )
