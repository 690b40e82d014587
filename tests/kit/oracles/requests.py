"""Requests of the master oracle and how to run them: alone, or all at once, through the public API."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from blockyard.client.codec import make_spec
from blockyard.client.results import StructuredOutputsParams
from blockyard.client.resumption import CompletionBuilder
from blockyard.contract.codec.events import decode_event
from blockyard.contract.events import Delta, Finished
from blockyard.contract.sampling import BeamSearch, EarlyStopping
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.client.results import Choice, Completion, GenerationOptions
    from blockyard.contract.events import TokenLogprobs

# Of answers that go on for as long as they may, and of some that end before.
FORMS = (
    StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "minItems": 40}),
    StructuredOutputsParams(regex="([a-z]{1,3}[ ,]){30}"),
    StructuredOutputsParams(json={"type": "object", "additionalProperties": {"enum": ["yes", 1, None]}}),
)


@dataclass(frozen=True)
class Answer:
    """What a request gives however it is run: ids, texts, finish reasons, log probabilities and scores, to the bit."""

    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    determinism_id: str


def make_specs(vocab_size: int, count: int = 32, seed: int = 7) -> list[inference_pb2.GenerationSpec]:
    """Makes requests that differ in everything: shared prefixes, lengths, and what they ask for."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(vocab_size) for _ in range(rng.choice([33, 64, 97]))] for _ in range(4)]
    specs: list[inference_pb2.GenerationSpec] = []
    for number in range(count):
        prompt = prefixes[number % 4] + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))]
        if number % 8 == 7:
            # The same prompt as its neighbour's, whole blocks of it: a prompt that is found entirely.
            prompt = prefixes[number % 4][:64]
        specs.append(make_spec(prompt, _make_options(number, rng)))
    return specs


def _make_options(number: int, rng: random.Random) -> GenerationOptions:
    """Makes greedy, seeded, penalized, branching and beam-searched ones, with and without log probabilities."""
    options: GenerationOptions = {"return_token_ids": True, "max_tokens": rng.randrange(20, 60), "temperature": 0.0}
    if number % 8 == 4:
        stopping = list(EarlyStopping)[number // 8 % 3]
        return options | {"n": 2, "beam_search": BeamSearch(4, 0.5 + number / 32, stopping)}
    if number % 4 in (1, 2):
        options["n"] = 3
    if number % 2:
        options |= {"temperature": 0.9, "seed": number, "top_p": rng.choice([1.0, 0.9])}
        if number % 3 == 0:
            options["top_k"] = 20
        if number % 5 == 0:
            options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2}
    if number % 3 == 0:
        options["logprobs"] = number % 4
    if number % 6 == 0:
        options["prompt_logprobs"] = 2
    if number % 5 == 2:
        options["stop"] = ["ab", "e", "t"]
    if number % 8 in (1, 6):
        options["structured_outputs"] = FORMS[number % len(FORMS)]
    return options


async def stream(stub: inference_pb2_grpc.InferenceServiceAsyncStub, spec: inference_pb2.GenerationSpec) -> Answer:
    """Runs one request and checks its stream: `seq` without gaps, totals that agree, one end for each sequence."""
    builder, seq = CompletionBuilder(), 0
    num_tokens, num_text_bytes = Counter[int](), Counter[int]()
    ends: list[int] = []
    async for response in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)):
        assert response.event.seq == seq
        seq += 1
        event = decode_event(response.event)
        assert event is not None
        builder.add(event)
        match event:
            case Delta(index=index):
                num_tokens[index] += len(event.token_ids)
                num_text_bytes[index] += len(event.text.encode())
                assert event.num_tokens == num_tokens[index]
                assert event.num_text_bytes == num_text_bytes[index]
            case Finished(index=index):
                ends.append(index)
                assert event.usage.num_completion_tokens == num_tokens[index]
            case _:
                pass
    assert sorted(ends) == list(range(spec.n or 1))
    return _answer_of(builder.build())


def _answer_of(completion: Completion) -> Answer:
    """Leaves out how it was run: what was found in the prefix cache."""
    choices = [replace(each, usage=replace(each.usage, num_cached_tokens=0)) for each in completion.choices]
    return Answer(tuple(choices), completion.prompt_logprobs, completion.determinism_id)


async def run(target: str, specs: Sequence[inference_pb2.GenerationSpec], *, concurrent: bool) -> list[Answer]:
    """Runs requests through a gateway, all at once or one after the other."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if concurrent:
            return list(await asyncio.gather(*(stream(stub, spec) for spec in specs)))
        return [await stream(stub, spec) for spec in specs]
