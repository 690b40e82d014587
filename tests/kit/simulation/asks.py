"""What simulated clients ask for, and what they must get: the answer that the request has when it runs alone."""

from __future__ import annotations

import atexit
import json
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.contract.codec.pooling import encode_pooling
from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling
from blockyard.contract.sampling import BeamSearch, EarlyStopping
from blockyard.errors import TABLE, Reason
from gateway.pooling.model import read_model_rule
from gateway.text.tokenizer_files import load_tokenizer
from scheduler_service.core.values import GroupSpec, LoraSpec, NewSequence
from tests.kit.fakes.fake_loras import digest_of
from tests.kit.oracles.model_worker import Row, generate_alone, pool_alone
from tests.kit.processes.system import ROOT

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from gateway.text.tokenizer import Tokenizer

MODEL = ROOT / "models" / "demo"
# The demo model's tokens of one character, and a few more: of these a beam's proposals are cheap to sort.
VOCAB_SIZE = 300
MAX_MODEL_LEN = 128
SHARED_PREFIX = tuple(range(40, 60))
# Within this time all requests and faults begin.
SECONDS = 5.0
# The adapters that are there from the start, and one that only operators load.
ADAPTERS, LATE_ADAPTER = ("first", "second"), "late"
# Errors with which a request may fail although nothing was wrong with it: all processes that had it died with a worker
# each time.
ALLOWED = frozenset({Reason.POISON_REQUEST})
# A request with a deadline may fail with it, or with what kept it waiting.
LATE = frozenset({Reason.GENERATION_DEADLINE, *(r for r in Reason if TABLE[r].http_status == 503)})


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@cache
def model_folder(task: Task) -> Path:
    """The demo model's folder; for vectors, one that also says which rows make a vector: the last ones."""
    if task is Task.GENERATE:
        return MODEL
    keep = tempfile.TemporaryDirectory()
    atexit.register(keep.cleanup)
    folder = Path(keep.name) / MODEL.name
    (folder / "1_Pooling").mkdir(parents=True)
    for file in MODEL.glob("*.json"):
        (folder / file.name).symlink_to(file)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


@dataclass(frozen=True)
class Ask:
    """A request of a client.

    Attributes:
        at: when it is sent, in seconds after the start.
        client: the client's number; each prefers another gateway.
        prompt: ids, or a text.
        is_chat: the text is a message of a conversation.
        adapter: the adapter's name; empty: none.
        options: more options, none of which changes the answer.
        timeout: the client's deadline in seconds.
        versions: the names of the weights that the model is updated to meanwhile.
        inputs: the inputs of a pooling call, which has no prompt.
        conduct: what the client does, a key of `tests.kit.simulation.clients.CONDUCTS`.
        num_events: the number of events after which it does so.
    """

    number: int
    at: float
    client: int
    prompt: tuple[int, ...] | str = ()
    max_tokens: int = 1
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    seed: int = 1
    beams: BeamSearch | None = None
    adapter: str = ""
    more: tuple[tuple[str, Any], ...] = ()
    timeout: float | None = None
    is_chat: bool = False
    versions: tuple[str, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()
    conduct: str = "reads"
    num_events: int = 0
    allowed: frozenset[Reason] = field(default=ALLOWED, repr=False)

    @property
    def request_id(self) -> str:
        return f"request-{self.number}"

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": list(self.stop),
            "stop_token_ids": sorted(self.stop_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": self.request_id,
            **dict(self.more),
        }
        if self.adapter:
            options["model"] = self.adapter
        return options | ({"beam_search": self.beams} if self.beams else {"seed": self.seed})

    @property
    def messages(self) -> list[dict[str, str]]:
        assert isinstance(self.prompt, str)
        return [{"role": "user", "content": self.prompt}]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        if not isinstance(self.prompt, str):
            return self.prompt
        text = tokenizer().apply_chat_template(list[Any](self.messages)) if self.is_chat else self.prompt
        return tuple(tokenizer().encode(text, not self.is_chat))

    @property
    def http_path(self) -> str:
        """The path of OpenAI's API for it."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def http_body(self) -> bytes:
        prompt = {"messages": self.messages} if self.is_chat else {"prompt": self.prompt}
        body = self.options | prompt | {"stream": True}
        del body["request_id"]
        return json.dumps(body).encode()


class Answer(NamedTuple):
    """A sequence of an answer."""

    token_ids: tuple[int, ...]
    text: str


def find_due(ask: Ask, index: int, came: Sequence[int]) -> Answer | None:
    """Finds what a sequence must be, of which these tokens came; None if anything may have come.

    While weights are updated, each token must be what some of the weights make of the text before it.
    """
    if not ask.versions:
        return answers_alone(ask)[index]
    # How the beams of a search changed on the way is not told.
    return None if ask.beams else _cut(ask, _follow(ask, index, came))


def _follow(ask: Ask, index: int, came: Sequence[int]) -> list[int]:
    spec = _make_spec(ask)
    new = NewSequence(0, index, spec.prompt_token_ids, len(spec.prompt_token_ids), 0, (), spec)
    rows = [Row.make(new, weights) for weights in ("", *ask.versions)]
    token_ids: list[int] = []
    while len(token_ids) < ask.max_tokens:
        position = len(token_ids)
        drawn = [row.draw(ask.seed, VOCAB_SIZE) for row in rows]
        if position < len(came) and came[position] in drawn:
            token_ids.append(came[position])
        else:
            # A stop token is left out if the text before it ends with a stop text.
            token_ids.append(next((token_id for token_id in drawn if token_id in ask.stop_token_ids), drawn[-1]))
        for row in rows:
            row.append(token_ids[-1])
    return token_ids


def _make_spec(ask: Ask) -> GroupSpec:
    lora = LoraSpec(1, bytes.fromhex(digest_of(ask.adapter))) if ask.adapter else None
    limits = (ask.max_tokens, ask.min_tokens, ask.stop_token_ids)
    return GroupSpec("", "", ask.prompt_ids, ask.n, *limits, payload=b"", beams=ask.beams, lora=lora)


@lru_cache(1000)
def answers_alone(ask: Ask) -> list[Answer]:
    """Computes each sequence of a request, had it run alone."""
    spec = _make_spec(ask)

    def generate(index: int) -> list[int]:
        return generate_alone(
            spec, index, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, seed_of=lambda _: ask.seed
        )

    return [_cut(ask, generate(index)) for index in range(ask.n)]


def _cut(ask: Ask, token_ids: Sequence[int]) -> Answer:
    """Ends a sequence before the first stop text that is complete after min_tokens, if there is one; makes its text."""
    detokenizer = tokenizer().make_detokenizer()
    text = ""
    for count, token_id in enumerate(token_ids, 1):
        is_stop = count > ask.min_tokens and token_id in ask.stop_token_ids
        # The text of a stop token is left out, and so is the token if the text before it ends with a stop text.
        num_tokens, length = count - is_stop, len(text)
        text += "" if is_stop else detokenizer.push([token_id])
        if is_stop or count == len(token_ids):
            text += detokenizer.flush()
        ends = range(length + 1, len(text) + 1)
        # Of those that are complete at one character, the longest counts.
        found = [(end, end - len(stop)) for stop in ask.stop for end in ends if text.endswith(stop, 0, end)]
        if found and num_tokens > ask.min_tokens:
            return Answer(tuple(token_ids[:num_tokens]), text[: min(found)[1]])
        if is_stop:
            return Answer(tuple(token_ids[:count]), text)
    return Answer(tuple(token_ids), text)


@lru_cache(1000)
def vectors_alone(ask: Ask) -> list[bytes]:
    """Computes the numbers of each input of a pooling call, had it run alone."""
    rule = read_model_rule(model_folder(Task.EMBED), Task.EMBED)
    assert rule is not None
    pooling = encode_pooling(Pooling(rule.rule.kind, normalise=True)).SerializeToString()
    return [pool_alone(GroupSpec("", "", ids, 1, 1, 0, frozenset(), pooling=pooling)) for ids in ask.inputs]


# What requests may ask for. Each makes one of another, and may be combined with all others.


def _draw_several(draw: random.Random, ask: Ask) -> Ask:
    return replace(ask, n=draw.choice((2, 3, 4)))


def _draw_stops(draw: random.Random, ask: Ask) -> Ask:
    stops = frozenset(draw.sample(range(5, VOCAB_SIZE), 20))
    return replace(ask, stop_token_ids=stops, min_tokens=draw.choice((0, 0, min(4, ask.max_tokens))))


def _draw_beams(draw: random.Random, ask: Ask) -> Ask:
    beams = BeamSearch(draw.choice((2, 3)), draw.choice((0.5, 1.0, 2.0)), draw.choice(list(EarlyStopping)))
    return replace(ask, beams=beams)


def _draw_adapter(draw: random.Random, ask: Ask) -> Ask:
    adapter = draw.choice((*ADAPTERS, *ADAPTERS, LATE_ADAPTER))
    # Operators unload adapters, and one that loaded the scheduler anew may not have loaded them yet.
    return replace(ask, adapter=adapter, allowed=ask.allowed | {Reason.MODEL_NOT_FOUND})


def _draw_text(draw: random.Random, ask: Ask) -> Ask:
    """Digits: each is a token of its own, and one that the worker knows."""
    return replace(ask, prompt="".join(str(draw.randrange(10)) for _ in range(draw.randint(1, 50))))


def _draw_chat(draw: random.Random, ask: Ask) -> Ask:
    return replace(_draw_text(draw, ask), is_chat=True)


def _draw_stop(draw: random.Random, ask: Ask) -> Ask:
    return replace(ask, stop=tuple(draw.sample(("a", "e", "t", "in", "7", "Z", "the", ".", "0x", "\ufffd"), 4)))


def _draw_priority(draw: random.Random, ask: Ask) -> Ask:
    return replace(ask, more=(*ask.more, ("priority", draw.randint(-2, 2))))


def _draw_salt(draw: random.Random, ask: Ask) -> Ask:
    return replace(ask, more=(*ask.more, ("cache_salt", draw.choice("ab"))))


def _draw_queue_time(draw: random.Random, ask: Ask) -> Ask:
    more = (*ask.more, ("max_queue_time", draw.choice((0.05, 1.0, 5.0))))
    return replace(ask, more=more, allowed=ask.allowed | {Reason.QUEUE_DEADLINE})


def _draw_timeout(draw: random.Random, ask: Ask) -> Ask:
    return replace(ask, timeout=draw.choice((0.1, 1.0, 5.0, 20.0)), allowed=ask.allowed | LATE)


FEATURES: dict[str, Callable[[random.Random, Ask], Ask]] = {
    "several": _draw_several,
    "stop ids": _draw_stops,
    "beams": _draw_beams,
    "adapter": _draw_adapter,
    "text": _draw_text,
    "chat": _draw_chat,
    "stop texts": _draw_stop,
    "priority": _draw_priority,
    "salt": _draw_salt,
    "queue time": _draw_queue_time,
    "timeout": _draw_timeout,
}
# What clients do over HTTP, and over gRPC with pooling calls.
HTTP_CONDUCTS, POOLING_CONDUCTS = ("streams over HTTP", "is cut off over HTTP"), ("embeds", "embeds twice")
# How many requests use a feature that the scenario has.
FEATURE_SHARE = 0.25


def draw_ask(
    draw: random.Random, number: int, features: Sequence[str], conducts: Sequence[str], conduct_share: float
) -> Ask:
    """Draws a request for tokens. `conduct_share`: how probable it is that its client does one of `conducts`."""
    prompt = tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 40)))
    if draw.random() < 0.4:
        prompt = SHARED_PREFIX + prompt
    ask = Ask(number, draw.uniform(0.0, SECONDS), draw.randrange(16), prompt, draw.choice((1, 5, 20, 40)))
    ask = replace(ask, seed=draw.getrandbits(31))
    for feature in features:
        if draw.random() < FEATURE_SHARE:
            ask = FEATURES[feature](draw, ask)
    if ask.beams:
        # Beams have no texts to stop at, and cost most.
        ask = replace(ask, n=min(ask.n, ask.beams.width), max_tokens=min(ask.max_tokens, 12), stop=())
    conduct = draw.choice(conducts) if draw.random() < conduct_share else "reads"
    if conduct in HTTP_CONDUCTS and (ask.beams or ask.timeout):
        conduct = "reads"
    return replace(ask, conduct=conduct, num_events=draw.randint(0, 12))


def draw_pooling_ask(draw: random.Random, number: int) -> Ask:
    """Draws a pooling call."""
    lengths = [draw.randint(1, 40) for _ in range(draw.choice((1, 2, 8)))]
    inputs = tuple(tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(length)) for length in lengths)
    begin, client = draw.uniform(0.0, SECONDS), draw.randrange(16)
    return Ask(number, begin, client, inputs=inputs, conduct=draw.choice(POOLING_CONDUCTS))
