"""What fake gateways answer, and what they remember of it together.

The words of an answer are those of the prompt, again and again up to max_tokens (8 unless asked); a word is a token,
and its id is the word's length, so a prompt of token ids [3, 1] stands for the words "xxx" and "x".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MODEL = "fake"
SEED = 7
DEFAULT_MAX_TOKENS = 8
Spec = inference_pb2.GenerationSpec
Event = inference_pb2.GenerationEvent


@dataclass
class Memory:
    """What several gateways know of their requests, as their scheduler would.

    Attributes:
        specs: every request that is known, by id.
        running: ids of those that have not been told to their end.
        num_generated: how often an answer was begun, the first time or since it was forgotten.
    """

    specs: dict[str, Spec] = field(default_factory=dict[str, Spec])
    running: set[str] = field(default_factory=set[str])
    num_generated: int = 0

    def begin(self, spec: Spec) -> None:
        """Takes a request, or attaches to the same one; raises REQUEST_ID_CONFLICT."""
        if self.specs.setdefault(spec.request_id, spec) != spec:
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, f"{spec.request_id} is another request")
        if self.specs[spec.request_id] is spec:
            self.running.add(spec.request_id)
            self.num_generated += 1

    def find(self, request: inference_pb2.ResumeGenerateRequest) -> Spec:
        """Finds a request to read again, begins it again from its spec, or raises REQUEST_EXPIRED."""
        if request.request_id not in self.specs:
            if not request.HasField("spec"):
                raise BlockyardError(Reason.REQUEST_EXPIRED, f"{request.request_id} is not known")
            if not (request.HasField("seed") or request.spec.sampling.HasField("seed")):
                raise invalid([Violation("seed", "an answer that is forgotten needs its seed")])
            self.begin(request.spec)
        return self.specs[request.request_id]

    def end(self, request_id: str) -> bool:
        """Takes note that a request does not run any more; tells whether it did."""
        was_running = request_id in self.running
        self.running.discard(request_id)
        return was_running

    def forget(self) -> None:
        """Forgets everything."""
        self.specs.clear()
        self.running.clear()


def words_of(spec: Spec) -> list[str]:
    """The tokens of a prompt, as words."""
    if spec.WhichOneof("prompt") == "token_ids":
        return ["x" * number for number in spec.token_ids.ids]
    if spec.WhichOneof("prompt") == "conversation":
        return " ".join(part.text for part in spec.conversation.messages[-1].content).split()
    return spec.text.split()


def answer_of(spec: Spec) -> list[str]:
    """The tokens of an answer, as text: all but the first begin with a space."""
    words = words_of(spec) or ["nothing"]
    num_tokens = spec.stop.max_tokens or DEFAULT_MAX_TOKENS
    return [word if at == 0 else " " + word for at, word in enumerate((words * num_tokens)[:num_tokens])]


def accepted(spec: Spec) -> Event:
    """The first event."""
    seed = spec.sampling.seed if spec.sampling.HasField("seed") else SEED
    told = inference_pb2.Accepted(
        request_id=spec.request_id, num_prompt_tokens=len(words_of(spec)), seed=seed, model=MODEL
    )
    return Event(accepted=told)


def events(spec: Spec, positions: Iterable[inference_pb2.Position] = (), tokens_per_delta: int = 1) -> Iterator[Event]:
    """All events of an answer behind these positions, the sequences in turn. Raises FIELD_INVALID for a bad one."""
    yield accepted(spec)
    known = {position.index: position for position in positions}
    tokens = answer_of(spec)
    for position in known.values():
        _check(position, tokens)
    if spec.sampling.HasField("prompt_logprobs") and not known:
        told = [_logprobs(at, word, spec.sampling.prompt_logprobs) for at, word in enumerate(words_of(spec))]
        told[0].ClearField("chosen")
        yield Event(prompt_logprobs=inference_pb2.PromptLogprobs(logprobs=told))
    indexes = [index for index in range(spec.n or 1) if not (index in known and known[index].finished)]
    starts = {index: known[index].num_tokens if index in known else 0 for index in indexes}
    for start in range(0, len(tokens), tokens_per_delta):
        for index in indexes:
            end = start + tokens_per_delta
            if starts[index] < end and starts[index] < len(tokens):
                yield Event(delta=_delta(spec, index, tokens, max(start, starts[index]), end))
    for index in indexes:
        yield Event(finished=_finished(spec, index))


def _check(position: inference_pb2.Position, tokens: list[str]) -> None:
    came = tokens[: position.num_tokens]
    if position.num_text_bytes != len("".join(came).encode()):
        raise invalid([Violation("positions", f"not at the end of a token: {position}")])
    if position.token_ids and list(position.token_ids) != [_token_id(token) for token in came]:
        raise invalid([Violation("positions", f"other ids: {position}")])


def _token_id(token: str) -> int:
    return len(token.strip())


def _delta(spec: Spec, index: int, tokens: list[str], start: int, end: int) -> inference_pb2.Delta:
    new = tokens[start:end]
    delta = inference_pb2.Delta(
        index=index,
        text="".join(new),
        num_tokens=start + len(new),
        num_text_bytes=len("".join(tokens[:end]).encode()),
    )
    if spec.return_token_ids:
        delta.token_ids.extend(_token_id(token) for token in new)
    if spec.sampling.HasField("logprobs"):
        delta.logprobs.extend(_logprobs(start + at, token, spec.sampling.logprobs) for at, token in enumerate(new))
    return delta


def _logprobs(place: int, token: str, num_top: int) -> inference_pb2.TokenLogprobs:
    """Log probabilities that tell the places apart."""
    chosen = inference_pb2.TokenLogprob(token_id=_token_id(token), text=token, logprob=-float(place), rank=2)
    top = [inference_pb2.TokenLogprob(token_id=0, text="?", logprob=-0.5, rank=1 + rank) for rank in range(num_top)]
    return inference_pb2.TokenLogprobs(chosen=chosen, top=top)


def _finished(spec: Spec, index: int) -> inference_pb2.Finished:
    matched = inference_pb2.MatchedStop()
    if spec.stop.stop_strings:
        matched.stop_string = spec.stop.stop_strings[0]
    elif spec.stop.stop_token_ids:
        matched.stop_token_id = spec.stop.stop_token_ids[0]
    stopped = matched.WhichOneof("stop") is not None
    usage = sampling_pb2.Usage(
        num_prompt_tokens=len(words_of(spec)), num_cached_tokens=1, num_completion_tokens=len(answer_of(spec))
    )
    return inference_pb2.Finished(
        index=index,
        reason=sampling_pb2.FINISH_REASON_STOP if stopped else sampling_pb2.FINISH_REASON_LENGTH,
        matched_stop=matched,
        usage=usage,
        determinism_id="d",
        score=-float(index) if spec.HasField("beam_search") else None,
    )
