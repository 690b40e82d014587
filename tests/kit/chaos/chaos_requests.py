"""The requests of a chaos run: of every kind that an answer can depend on, and a function of the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.client.results import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.client.results import GenerationOptions

# Token ids that every model of ours has, and that are none of its special tokens.
TOKEN_IDS = range(10, 300)
SHARED_PREFIX_LENGTH = 96
TEXTS = (
    "The quick brown fox jumps over",
    "one two three four five six",
    "def add(first, second):",
    "naïve café, 漢字, ½ × € and 🙂",
)


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A prompt and how to continue it.

    Attributes:
        kind: its name in reports.
        stops: takes a stop string out of its own text, undisturbed and without one.
    """

    number: int
    kind: str
    prompt: str | list[int]
    options: GenerationOptions
    stops: bool = False


def _greedy(draw: random.Random) -> GenerationOptions:
    return {"temperature": 0.0}


def _seeded(draw: random.Random) -> GenerationOptions:
    return {"temperature": draw.uniform(0.7, 1.3), "seed": draw.getrandbits(32), "top_p": 0.95, "top_k": 80}


def _several(draw: random.Random) -> GenerationOptions:
    return {**_seeded(draw), "n": 3}


def _penalized(draw: random.Random) -> GenerationOptions:
    return {
        **_seeded(draw),
        "presence_penalty": draw.uniform(-1, 1),
        "frequency_penalty": draw.uniform(0, 1),
        "repetition_penalty": draw.uniform(1, 1.4),
    }


def _several_penalized(draw: random.Random) -> GenerationOptions:
    return {**_penalized(draw), "n": 3, "min_tokens": 10}


def _bounded(draw: random.Random) -> GenerationOptions:
    form = StructuredOutputsParams(regex="([a-z]{1,6}[ ,.]){60}")
    return {**_seeded(draw), "n": 2, "structured_outputs": form, "ignore_eos": False}


KINDS: dict[str, Callable[[random.Random], GenerationOptions]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "n=3": _several,
    "stop string": _seeded,
    "penalties": _penalized,
    "shared prefix": _seeded,
    "text": _seeded,
    "grammar": _bounded,
    "n=3, penalties, stop string": _several_penalized,
}


def make_requests(seed: int, number: int) -> list[ChaosRequest]:
    """Makes `number` requests, the kinds in turn, every second time with log probabilities."""
    shared_prefix = random.Random(f"{seed}/prefix").choices(TOKEN_IDS, k=SHARED_PREFIX_LENGTH)
    return [_make(seed, index, shared_prefix) for index in range(number)]


def _make(seed: int, number: int, shared_prefix: list[int]) -> ChaosRequest:
    draw = random.Random(f"{seed}/request/{number}")
    kind = list(KINDS)[number % len(KINDS)]
    options: Any = {
        "max_tokens": draw.randint(60, 200),
        "ignore_eos": draw.random() < 0.8,
        "return_token_ids": True,
        **KINDS[kind](draw),
    }
    if number // len(KINDS) % 2:
        options["logprobs"] = 2
    prompt: str | list[int] = draw.choices(TOKEN_IDS, k=draw.randint(3, 60))
    if kind == "text":
        prompt = draw.choice(TEXTS)
    elif kind == "shared prefix":
        prompt = shared_prefix + prompt
    return ChaosRequest(number, kind, prompt, options, stops="stop string" in kind)
