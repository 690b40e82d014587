"""Checks calls for vectors, scores and labels: yields all violations, under the contract's field names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import Reason, Violation, invalid
from gateway.pooling_calls import MAX_INPUTS, CallOptions, Input
from gateway.request import REQUEST_ID_RULE, is_request_id
from gateway.validation import size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.pooling.inputs import EncodedPair
    from gateway.pooling.model import PooledModel

MAX_VIOLATIONS = 100
MAX_ANSWER_NUMBERS = 3 * 2**20
"""The most numbers of an answer: as float32, they are well below the largest message."""
MAX_QUEUE_SECONDS = 1e9
_INT32 = 2**31


def check_options(options: CallOptions) -> Iterator[Violation]:
    if options.request_id and not is_request_id(options.request_id):
        yield Violation("request_id", REQUEST_ID_RULE)
    limit = options.truncate_prompt_tokens
    if limit is not None and limit != -1 and limit < 1:
        description = f"must be at least 1, or -1 for the model's limit, not {limit}"
        yield Violation("truncate_prompt_tokens", description)
    if not -_INT32 <= options.priority < _INT32:
        yield Violation("priority", f"must be from -2^31 to 2^31 - 1, not {options.priority}")
    longest = options.max_queue_seconds
    if longest is not None and not 0 < longest <= MAX_QUEUE_SECONDS:
        yield Violation(
            "max_queue_time", f"must be above 0 and at most {MAX_QUEUE_SECONDS:.0f} seconds, not {longest:g}"
        )


def check_inputs(field: str, inputs: Sequence[Input]) -> Iterator[Violation]:
    """Yields the violations of inputs that can be found before tokenizing."""
    if not 1 <= len(inputs) <= MAX_INPUTS:
        yield Violation(field, f"must have 1 to {MAX_INPUTS} entries, not {len(inputs)}")
        return
    for place, given in enumerate(inputs):
        if not given:
            yield Violation(f"{field}[{place}]", "must not be empty")


def check_characters(
    field: str, inputs: Sequence[Input], options: CallOptions, model: PooledModel
) -> Iterator[Violation]:
    """Yields the violations of inputs that have too many characters to fit the model, without tokenizing them."""
    if model.encoder.limit_of(options) is not None:
        return
    for place, given in enumerate(inputs):
        if isinstance(given, str) and len(given) > model.max_tokens:
            # A model that lowers the case of texts keeps or increases their number of characters.
            least = model.encoder.tokenizer.min_tokens(given, model.max_tokens + 1)
            if least > model.max_tokens:
                yield input_too_long(f"{field}[{place}]", size_of(len(given), least), model.max_tokens)


def check_tokens(field: str, encoded: Sequence[EncodedPair], model: PooledModel) -> Iterator[Violation]:
    for place, each in enumerate(encoded):
        name, token_ids = f"{field}[{place}]", each.token_ids
        if not token_ids:
            yield Violation(name, "must not be empty: it has no token")
        elif len(token_ids) > model.max_tokens:
            size = f"has {len(token_ids)} tokens" if each.is_whole else f"has more than {len(token_ids)} tokens"
            yield input_too_long(name, size, model.max_tokens)
        if any(not 0 <= token_id < model.vocab_size for token_id in token_ids):
            yield Violation(name, f"token ids must be from 0 to {model.vocab_size - 1}")


def input_too_long(name: str, size: str, max_tokens: int) -> Violation:
    """Returns the violation for an input that is too long for the model. `size`: the beginning of its description."""
    limit = f"This model's maximum context length is {max_tokens} tokens of an input"
    description = f"{size}. {limit}; truncate_prompt_tokens cuts it"
    return Violation(name, description, Reason.PROMPT_TOO_LONG)


def check_dimensions(dimensions: int | None, num_inputs: int, model: PooledModel) -> Iterator[Violation]:
    """Yields the violations in the size of a vector or of all vectors together."""
    if dimensions is not None and not 1 <= dimensions <= (model.width or _INT32):
        most = f"to {model.width}, which the model's vectors have" if model.width else "on"
        yield Violation("dimensions", f"must be from 1 {most}, not {dimensions}")
        return
    width = dimensions or model.width
    if width * num_inputs > MAX_ANSWER_NUMBERS:
        most = MAX_ANSWER_NUMBERS // width
        description = f"must be at most {most} for vectors of {width} numbers, or the answer is too large"
        yield Violation("inputs", description, Reason.MESSAGE_TOO_LARGE)


def require(violations: Iterator[Violation] | Sequence[Violation]) -> None:
    """Raises a BlockyardError with the violations, if there are any."""
    if listed := list(violations)[:MAX_VIOLATIONS]:
        raise invalid(listed)
