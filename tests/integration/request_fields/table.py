"""Every field of AddRequest and what it carries: what no gateway should put there, who refuses it, and why.

A row holds values for one field, and who refuses a request that has one of them:

- SCHEDULER: at its door. It costs others nothing.
- WORKER: as the failure of one sequence. It costs others the row and the blocks that it had until then.
- NOBODY: it is a request like any, and costs others its share.

A request on which the values are tried is a `Base`; PLAIN unless the row says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf.duration_pb2 import Duration

from blockyard.errors import BlockyardError, Reason, to_status

VOCAB_SIZE, MAX_MODEL_LEN = 384, 128
ENDLESS, NEVER = Duration(seconds=315_576_000_000), Duration(seconds=-315_576_000_000)
NAN, INFINITE = float("nan"), float("inf")
FOREIGN_IDS = ([5, VOCAB_SIZE], [4096], [2**30], [2**32 - 1])
MAX_UINT32, MAX_UINT64 = 2**32 - 1, 2**64 - 1


class Base(Enum):
    """The right request in which one field is changed."""

    PLAIN = "two sequences"
    SEARCHED = "a beam search"
    ADAPTED = "one with an adapter"
    RESUBMITTED = "one that ran before"
    ENDED = "one that ended before"
    POOLED = "numbers, of a model that makes some"
    MISPLACED = "numbers, of a model that generates"
    LOST = "one with an adapter whose files are gone"


class Refuser(Enum):
    """Who refuses a request."""

    SCHEDULER = "the scheduler"
    WORKER = "the worker"
    NOBODY = "nobody"


SCHEDULER, WORKER, NOBODY = Refuser
INVALID = Reason.FIELD_INVALID


@dataclass(frozen=True)
class Row:
    """Values for one field, by its path, and what becomes of a request that has one of them."""

    path: str
    values: tuple[Any, ...]
    refuser: Refuser
    reason: Reason | None = INVALID
    base: Base = Base.PLAIN


def harmless(path: str, *values: Any, base: Base = Base.PLAIN) -> Row:
    """Values that nobody needs to refuse."""
    return Row(path, values, NOBODY, None, base)


_SAMPLING = [
    Row("sampling.temperature", (-1.0, NAN, INFINITE), WORKER),
    harmless("sampling.temperature", 0.0, 1e-45, 3e38),
    Row("sampling.top_p", (0.0, -0.5, 1.5, NAN), WORKER),
    harmless("sampling.top_p", 1e-45),
    harmless("sampling.top_k", 0, VOCAB_SIZE + 1, MAX_UINT32),
    Row("sampling.min_p", (-0.5, 1.5, NAN), WORKER),
    Row("sampling.presence_penalty", (INFINITE, NAN), WORKER),
    Row("sampling.frequency_penalty", (INFINITE, NAN), WORKER),
    Row("sampling.repetition_penalty", (0.0, -1.0, INFINITE, NAN), WORKER),
    harmless("sampling.seed", 0, MAX_UINT64),
    Row("sampling.logit_bias", ({VOCAB_SIZE: 1.0}, {2**30: 1.0}, {5: NAN}, {5: INFINITE}), WORKER),
    harmless("sampling.logit_bias", {5: 3e38}, {5: -3e38}),
    Row("sampling.allowed_token_ids", FOREIGN_IDS, WORKER),
    harmless("sampling.allowed_token_ids", [1]),
    Row("sampling.predicted_token_ids", FOREIGN_IDS, WORKER),
    harmless("sampling.predicted_token_ids", [1]),
    harmless("sampling.speculation", False),
    harmless("sampling.bad_words", ["", "no"]),
    Row("sampling.bad_token_sequences.token_ids", (*FOREIGN_IDS, []), WORKER),
    Row("sampling.logprobs", (21, MAX_UINT32), WORKER),
    Row("sampling.prompt_logprobs", (21, MAX_UINT32), WORKER),
    harmless("sampling.thinking_token_budget", 0, MAX_UINT32),
    Row("sampling.thinking_tokens.end_token_id", (VOCAB_SIZE, MAX_UINT32), WORKER),
    harmless("sampling.thinking_tokens.end_token_id", 5),
    Row("sampling.thinking_tokens.begins.token_ids", (*FOREIGN_IDS, []), WORKER),
    harmless("sampling.thinking_tokens.is_open", True),
    harmless("sampling.thinking_tokens.begins_anywhere", True),
    Row("sampling.grammar", ("{", "\0"), WORKER),
    Row("sampling.grammar", ("start: start",), WORKER, Reason.GRAMMAR_DEAD_END),
    Row("sampling.grammar", ("x" * (17 << 20),), SCHEDULER, Reason.MESSAGE_TOO_LARGE),
]

_POOLING = [
    Row("pooling.kind", (5, 7, -1, 2**31 - 1), WORKER, base=Base.POOLED),
    Row("pooling.label_token_ids", ([5], [2**30]), WORKER, base=Base.POOLED),
    Row("sampling.prompt_logprobs", (1,), WORKER, base=Base.POOLED),
    harmless("pooling.normalise", True, base=Base.POOLED),
    Row("pooling.dimensions", (MAX_UINT32,), WORKER, base=Base.POOLED),
    harmless("pooling.leaves_raw", True, base=Base.POOLED),
    Row("pooling.second_from", (1, MAX_UINT32), WORKER, base=Base.POOLED),
    Row("pooling.kind", (1,), SCHEDULER),
    Row("pooling.kind", (1,), SCHEDULER, Reason.FEATURE_DISABLED, base=Base.MISPLACED),
    Row("n", (2,), SCHEDULER, base=Base.POOLED),
    Row("max_tokens", (5,), SCHEDULER, base=Base.POOLED),
    Row("prompt_token_ids", FOREIGN_IDS, SCHEDULER, base=Base.POOLED),
]

_LORA = [
    Row("lora.lora_id", (0,), SCHEDULER, base=Base.ADAPTED),
    harmless("lora.lora_id", MAX_UINT32, base=Base.ADAPTED),
    Row("lora.lora_id", (77,), SCHEDULER, Reason.MODEL_NOT_LOADED, base=Base.LOST),
    Row("lora.name", ("",), SCHEDULER, base=Base.ADAPTED),
    Row("lora.path", ("",), SCHEDULER, base=Base.ADAPTED),
    harmless("lora.path", "/nowhere", base=Base.ADAPTED),
    Row("lora.digest", ("", "zz", "0" * 64), SCHEDULER, base=Base.ADAPTED),
    harmless("lora.pinned", True, base=Base.ADAPTED),
    Row("lora.num_virtual_tokens", (3,), WORKER, base=Base.ADAPTED),
    Row("lora.num_virtual_tokens", (2**14 + 1, MAX_UINT32), SCHEDULER, base=Base.ADAPTED),
]

_RESUBMISSION = [
    harmless("resubmission.age", ENDLESS, NEVER, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_accepted_tokens", 7, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_rejected_tokens", 7, base=Base.RESUBMITTED),
    Row("resubmission.sequences.token_ids", FOREIGN_IDS, SCHEDULER, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_accepted_tokens", 7, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_rejected_tokens", 7, base=Base.RESUBMITTED),
    Row("resubmission.sequences.token_ids", ([5] * 9, [5] * 10_000), SCHEDULER, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_accepted_tokens", 7, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_rejected_tokens", 7, base=Base.RESUBMITTED),
    Row("resubmission.sequences.token_ids", FOREIGN_IDS, SCHEDULER, base=Base.ENDED),
    harmless("resubmission.sequences.token_ids", [], [5] * 8, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.finish_reason", 1, 2, 99, -1, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.logprobs.num_candidates", [MAX_UINT32], [0, 0, 0], base=Base.RESUBMITTED),
    harmless("resubmission.sequences.logprobs.token_ids", [MAX_UINT32], base=Base.RESUBMITTED),
    harmless("resubmission.sequences.logprobs.logprobs", [NAN, INFINITE], base=Base.RESUBMITTED),
    harmless("resubmission.sequences.logprobs.ranks", [MAX_UINT32], base=Base.RESUBMITTED),
    harmless("resubmission.sequences.score", NAN, INFINITE, base=Base.RESUBMITTED),
    harmless(
        "resubmission.sequences.error", to_status(BlockyardError(Reason.NOT_FINITE, "a test")), base=Base.RESUBMITTED
    ),
    harmless("resubmission.sequences.pooled_values", b"123", base=Base.RESUBMITTED),
    harmless("resubmission.num_cached_tokens", MAX_UINT32, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_accepted_tokens", 7, base=Base.RESUBMITTED),
    harmless("resubmission.sequences.prediction.num_rejected_tokens", 7, base=Base.RESUBMITTED),
    Row("resubmission.sequences.token_ids", ([5],), SCHEDULER, base=Base.POOLED),
]

ROWS = [
    Row("request_id", ("", "x" * 1025), SCHEDULER),
    harmless("request_id", "\0", "tenant/\u202e"),
    Row("prompt_token_ids", (*FOREIGN_IDS, []), SCHEDULER),
    Row("prompt_token_ids", (FOREIGN_IDS[2],), SCHEDULER, base=Base.ADAPTED),
    Row("prompt_token_ids", ([5] * MAX_MODEL_LEN, [5] * 10_000), SCHEDULER, Reason.NEVER_FITS),
    Row("n", (0, 257, MAX_UINT32), SCHEDULER),
    *_SAMPLING,
    Row("max_tokens", (0,), SCHEDULER),
    harmless("max_tokens", MAX_UINT32),
    harmless("min_tokens", MAX_UINT32),
    harmless("stop_token_ids", [2**30], [MAX_UINT32], list(range(VOCAB_SIZE))),
    Row("stop_token_ids", (list(range(VOCAB_SIZE + 100)),), WORKER),
    Row("stop_token_ids", (list(range(2 * VOCAB_SIZE + 1)),), SCHEDULER),
    Row("stop_token_ids", (list(range(65)),), SCHEDULER, base=Base.SEARCHED),
    harmless("handle", 0, MAX_UINT64),
    harmless("tenant", "\0", "tenant"),
    Row("tenant", ("x" * 1025,), SCHEDULER),
    harmless("digest", b"", b"x" * 1000),
    harmless("gateway_state", b"", b"\xff" * 1000),
    harmless("priority", -(2**31), 2**31 - 1),
    Row("max_queue_time", (NEVER,), SCHEDULER, Reason.QUEUE_DEADLINE),
    harmless("max_queue_time", ENDLESS),
    Row("remaining_time", (NEVER,), SCHEDULER, Reason.GENERATION_DEADLINE),
    harmless("remaining_time", ENDLESS),
    Row("beam_search.width", (0, 1, 257, MAX_UINT32), SCHEDULER, base=Base.SEARCHED),
    Row("beam_search.length_penalty", (NAN, INFINITE, -INFINITE), SCHEDULER, base=Base.SEARCHED),
    harmless("beam_search.length_penalty", 3e38, -3e38, 1e-45, base=Base.SEARCHED),
    harmless("beam_search.early_stopping", 99, -1, base=Base.SEARCHED),
    *_RESUBMISSION,
    harmless("trace_context.traceparent", "", "no such", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
    harmless("trace_context.tracestate", "x" * 100_000),
    *_POOLING,
    *_LORA,
    harmless("fails_on_update", True),
    harmless("computes_whole_prompt", True),
    harmless("cache_salt", b"", b"x" * 1000),
    harmless("age", ENDLESS, NEVER),
]
