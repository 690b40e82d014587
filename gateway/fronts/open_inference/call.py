"""Turns an inference request into a completion and the names of its answer's tensors.

Owns the names of the model's tensors and of the request's parameters. The sampling parameters have the names and types
of a completion's body; the core checks their ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import pydantic
import pydantic_core

from blockyard.contract.request import OnDisconnect
from blockyard.errors import Reason, Violation, invalid, quote
from gateway.fronts.http_calls.bodies import from_validation
from gateway.fronts.http_calls.body_types import Neutral
from gateway.fronts.openai.call_spec import CallSpec, understand_completion
from gateway.fronts.openai.errors import rename
from gateway.fronts.openai.schema.requests import CompletionBody

if TYPE_CHECKING:
    from gateway.fronts.open_inference.tensors import InferRequest

MODEL_VERSION = "1"


class OutputKind(NamedTuple):
    """A tensor that an answer may have. `flag`: the input that requests it; empty: always present.

    `needs_logprobs`: whether it is computed from log probabilities.
    """

    datatype: str
    flag: str = ""
    needs_logprobs: bool = False


OUTPUTS = {
    "text_output": OutputKind("BYTES"),
    "finish_reason": OutputKind("BYTES", "return_finish_reason"),
    "cumulative_logprob": OutputKind("FP32", "return_cumulative_logprob", needs_logprobs=True),
    "logprobs": OutputKind("BYTES", "return_logprobs", needs_logprobs=True),
    "num_input_tokens": OutputKind("UINT32", "return_num_input_tokens"),
    "num_output_tokens": OutputKind("UINT32", "return_num_output_tokens"),
}
_FLAGS = ("stream", "exclude_input_in_output", *(kind.flag for kind in OUTPUTS.values() if kind.flag))
# The datatypes of input tensors by name. All inputs except text_input have one element.
INPUTS = {"text_input": "BYTES", "sampling_parameters": "BYTES"} | dict.fromkeys(_FLAGS, "BOOL")

# Fields of a completion's body that inference requests set in another way.
_ELSEWHERE = {
    "echo": "use exclude_input_in_output",
    "model": "use model_name",
    "prompt": "use text_input",
    "request_id": "use id",
    "stream": "it is a tensor or parameter of its own",
    "stream_options": "use return_num_output_tokens",
}
# Triton's parameters for models that keep state between requests.
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
# No effect: the last response of a stream is always marked as final.
_WITHOUT_EFFECT = "triton_enable_empty_final_response"
# The names in this API for parameters of the core and of completions, where they differ.
_NAMES = {"prompt": "text_input", "request_id": "id", "model": "model_name"}


class _Body(CompletionBody):
    """A completion's body, and further parameters of vLLM or of its backend for Triton."""

    detokenize: Annotated[Any, Neutral(True)] = None
    guided_decoding: Annotated[Any, Neutral()] = None
    lora_name: Annotated[Any, Neutral()] = None
    # The API has no tensors for these.
    prompt_logprobs: Annotated[Any, Neutral()] = None
    return_token_ids: Annotated[Any, Neutral(False)] = None


@dataclass(frozen=True, slots=True)
class InferCall:
    """An inference request as a completion.

    Attributes:
        call: the completion; its choices, in their order, are the elements of each output.
        name: the client's id for the request, or empty.
        stream: whether the answer is streamed.
        outputs: the names of the answer's tensors.
        prefixes: for each prompt, the text to put before its choices' texts; empty: none.
        is_raw: whether tensors are sent as bytes, in the request and in the answer.
        timeout_seconds: the longest time for the request; None: no limit.
    """

    call: CallSpec
    name: str
    stream: bool
    outputs: tuple[str, ...]
    prefixes: tuple[str, ...]
    is_raw: bool
    timeout_seconds: float | None

    def of_caller(self, tenant: str, remaining_seconds: float | None) -> InferCall:
        """Returns the call with its tenant and the remaining time, the shorter of the timeout and the deadline."""
        # A request that outlives its connection outlives the connection's deadline.
        is_kept = self.call.requests[0].on_disconnect is OnDisconnect.KEEP
        waits = (self.timeout_seconds, None if is_kept else remaining_seconds)
        remaining = min((seconds for seconds in waits if seconds is not None), default=None)
        requests = tuple(replace(request, tenant=tenant, remaining_seconds=remaining) for request in self.call.requests)
        return replace(self, call=replace(self.call, requests=requests))


def understand(request: InferRequest) -> InferCall:
    """Makes the call of an inference request; raises BlockyardError with all violations.

    First checks the tensors, then names and types of the sampling parameters; the core checks their values.
    """
    reading = _Reading(request)
    prompts = reading.prompts()
    flags = {name: reading.flag(name) for name in _FLAGS}
    outputs = reading.outputs(flags)
    timeout_seconds = reading.timeout_seconds()
    sampling = reading.sampling()
    stream, excludes = bool(flags["stream"]), flags["exclude_input_in_output"]
    if stream and excludes is False:
        reading.refuse("exclude_input_in_output", "must be true, or absent, where stream is true")
    if stream and len(prompts) > 1:
        reading.refuse("text_input", "must hold one prompt where stream is true; send a request for each")
    reading.check()
    if any(OUTPUTS[name].needs_logprobs for name in outputs) and sampling.get("logprobs") is None:
        sampling["logprobs"] = 0
    body = {**sampling, "prompt": prompts, "request_id": request.name or None, "model": request.model_name}
    prepends = not stream if excludes is None else not excludes
    return InferCall(
        _completion(body),
        name=request.name,
        stream=stream,
        outputs=outputs,
        prefixes=tuple(prompts) if prepends else (),
        is_raw=request.is_raw,
        timeout_seconds=timeout_seconds,
    )


def _completion(body: dict[str, Any]) -> CallSpec:
    try:
        # Not strict: Triton's clients send numbers as texts.
        understood = _Body.model_validate(body, strict=False)
    except pydantic.ValidationError as error:
        raise rename(from_validation(error), _NAMES) from None
    return replace(understand_completion(understood), names=_NAMES)


class _Reading:
    """Reads the parts of a request, each part once, and collects the violations."""

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._inputs = request.inputs
        self._parameters = dict(request.parameters)
        self._violations: list[Violation] = []
        self._check_version()
        for name in _SEQUENCES:
            if self._parameters.pop(name, None):
                self.refuse(name, "is not supported: a request has no state", Reason.UNSUPPORTED_PARAMETER)
        self._parameters.pop(_WITHOUT_EFFECT, None)

    def _check_version(self) -> None:
        version = self._request.model_version
        if not is_version(version):
            self.refuse(
                "model_version", f"{quote(version)} is not served; {MODEL_VERSION!r} is", Reason.MODEL_NOT_FOUND
            )

    def refuse(self, field: str, description: str, reason: Reason = Reason.FIELD_INVALID) -> None:
        self._violations.append(Violation(field, description, reason))

    def check(self) -> None:
        """Raises BlockyardError with the violations so far, if there are any."""
        if self._violations:
            raise invalid(self._violations)

    def prompts(self) -> list[str]:
        elements = self._inputs.get("text_input")
        if not elements:
            self.refuse("text_input", "is required" if elements is None else "must hold a prompt")
            return []
        try:
            return [element.decode() for element in elements]
        except UnicodeDecodeError:
            self.refuse("text_input", "must be UTF-8")
            return []

    def _single(self, name: str) -> Any:
        """Returns the element of a one-element tensor, or the value of a parameter; None if the request has neither."""
        parameter = self._parameters.pop(name, None)
        elements = self._inputs.get(name)
        if elements is None:
            return parameter
        if len(elements) != 1:
            self.refuse(name, f"must have one element, not {len(elements)}")
            return None
        return elements[0]

    def flag(self, name: str) -> bool | None:
        """Reads a boolean from a tensor or a parameter; None if the request has neither."""
        value = self._single(name)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(name, "must be true or false")
        return None

    def outputs(self, flags: dict[str, bool | None]) -> tuple[str, ...]:
        """Returns the names of the answer's tensors: the requested outputs, or else the outputs whose flags are set."""
        requested = self._request.outputs
        if not requested:
            return tuple(name for name, kind in OUTPUTS.items() if not kind.flag or flags[kind.flag])
        if self._request.num_outputs > len(OUTPUTS):
            self.refuse("outputs", f"must have at most {len(OUTPUTS)} tensors, not {self._request.num_outputs}")
            return ()
        for output in requested:
            if output.name not in OUTPUTS:
                self.refuse(output.name or "outputs", "is not an output of this model")
            elif output.has_parameters:
                self.refuse(output.name, "has parameters, which are not supported", Reason.UNSUPPORTED_PARAMETER)
        return tuple(dict.fromkeys(output.name for output in requested if output.name in OUTPUTS))

    def timeout_seconds(self) -> float | None:
        """Reads Triton's `timeout`, which is in microseconds; 0 means no timeout."""
        timeout = self._parameters.pop("timeout", None)
        if not timeout:
            return None
        if isinstance(timeout, int) and timeout > 0 and timeout is not True:
            return timeout / 1e6
        self.refuse("timeout", "must be a number of microseconds, at least 0")
        return None

    def sampling(self) -> dict[str, Any]:
        """Reads the sampling parameters. The tensor's JSON object overrides the request's parameters."""
        text = self._single("sampling_parameters")
        # All other parameters have been read: the remaining ones are sampling parameters.
        fields = self._parameters | self._object("sampling_parameters", text)
        for name, where in _ELSEWHERE.items():
            if name in fields:
                self.refuse(name, f"is not a sampling parameter here: {where}")
        return fields

    def _object(self, name: str, text: Any) -> dict[str, Any]:
        if text is None:
            return {}
        try:
            value = pydantic_core.from_json(text)
        except (TypeError, ValueError):
            value = None
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        self.refuse(name, "must be a JSON object")
        return {}


def is_version(version: str) -> bool:
    """Returns whether the model is served in this version. An empty version means any."""
    return version in ("", MODEL_VERSION)
