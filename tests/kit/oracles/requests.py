"""Requests of the master oracle and how to run them: alone, or all at once, through the public API."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from blockyard.common.v1 import sampling_pb2
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Answer:
    """What a request gave: for each of its sequences, the ids, the text and the finish reason."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    reasons: tuple[int, ...]
    num_cached_tokens: int


def make_specs(vocab_size: int, count: int = 32, seed: int = 7) -> list[inference_pb2.GenerationSpec]:
    """Makes requests that differ in everything: shared prefixes, lengths, greedy and seeded, n of 1 and 3."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(vocab_size) for _ in range(rng.choice([33, 64, 97]))] for _ in range(4)]
    specs: list[inference_pb2.GenerationSpec] = []
    for number in range(count):
        prompt = prefixes[number % 4] + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))]
        if number % 8 == 7:
            # The same prompt as its neighbour's, whole blocks of it: a prompt that is found entirely.
            prompt = prefixes[number % 4][:64]
        sampling = sampling_pb2.SamplingParams(temperature=0.0)
        if number % 2:
            sampling = sampling_pb2.SamplingParams(temperature=0.9, seed=number, top_p=rng.choice([1.0, 0.9]))
            if number % 3 == 0:
                sampling.top_k = 20
            if number % 5 == 0:
                sampling.frequency_penalty, sampling.repetition_penalty = 0.5, 1.2
        specs.append(
            inference_pb2.GenerationSpec(
                token_ids=inference_pb2.TokenIds(ids=prompt),
                n=3 if number % 4 in (1, 2) else 1,
                sampling=sampling,
                stop=sampling_pb2.StopCriteria(max_tokens=rng.randrange(20, 60)),
                return_token_ids=True,
            )
        )
    return specs


async def stream(stub: inference_pb2_grpc.InferenceServiceAsyncStub, spec: inference_pb2.GenerationSpec) -> Answer:
    """Runs one request and checks its stream: `seq` without gaps, totals that agree, one end for each sequence."""
    token_ids: list[list[int]] = [[] for _ in range(spec.n or 1)]
    texts = [""] * (spec.n or 1)
    ends: dict[int, inference_pb2.Finished] = {}
    expected_seq = 0
    async for response in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)):
        event = response.event
        assert event.seq == expected_seq
        expected_seq += 1
        if event.HasField("delta"):
            delta = event.delta
            token_ids[delta.index] += delta.token_ids
            texts[delta.index] += delta.text
            assert delta.num_tokens == len(token_ids[delta.index])
            assert delta.num_text_bytes == len(texts[delta.index].encode())
        elif event.HasField("finished"):
            assert event.finished.index not in ends
            ends[event.finished.index] = event.finished
    assert sorted(ends) == list(range(spec.n or 1))
    for index, end in ends.items():
        assert end.usage.num_completion_tokens == len(token_ids[index])
    return Answer(
        tuple(map(tuple, token_ids)),
        tuple(texts),
        tuple(ends[index].reason for index in sorted(ends)),
        ends[0].usage.num_cached_tokens,
    )


async def run(target: str, specs: Sequence[inference_pb2.GenerationSpec], *, concurrent: bool) -> list[Answer]:
    """Runs requests through a gateway, all at once or one after the other."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if concurrent:
            return list(await asyncio.gather(*(stream(stub, spec) for spec in specs)))
        return [await stream(stub, spec) for spec in specs]
