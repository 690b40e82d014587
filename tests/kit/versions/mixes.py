"""Runs the three services in every mix of this version and another one, and holds their answers against this one's.

Two gateways, one of each version, share a scheduler and its worker. The scheduler and the worker are killed in turn,
and each is replaced by its other version, so that both gateways serve with all four pairs of the two. Streams run
across each replacement, and each gateway reads the rest of answers that the other one began.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from blockyard import AsyncClient
from blockyard.client.access import ClientAccess
from blockyard.client.codec import make_spec
from blockyard.client.results import StructuredOutputsParams
from blockyard.client.resumption import Resumption
from blockyard.client.retry import Attempts, RetryPolicy
from blockyard.inference.v1 import inference_pb2_grpc
from blockyard.model_files import DEMO_FOLDER
from tests.kit.chaos.chaos_requests import ChaosRequest
from tests.kit.oracles.answers import check_all, read_answer, run_alone
from tests.kit.oracles.transcript import Transcript, difference
from tests.kit.processes.system import START_SECONDS, System
from tests.kit.versions import launcher
from tests.kit.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions
    from tests.kit.oracles.answers import Known

OTHER_GATEWAY = "gateway1"
REPLACED = ("scheduler", "worker", "scheduler", "worker")
SCHEDULER_FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "32", "--debug-integrity"]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SEEDED: GenerationOptions = {"temperature": 1.0, "seed": 11, "top_p": 0.95, "top_k": 80}
_EXACT: GenerationOptions = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
REQUESTS = [
    ChaosRequest(0, "greedy", [5, 6, 7], {**_EXACT, "temperature": 0.0}),
    ChaosRequest(1, "logprobs", [8, 9, 10, 11], {**_EXACT, **_SEEDED, "logprobs": 2, "prompt_logprobs": 1}),
    ChaosRequest(2, "n=2", "one two three", {**_EXACT, **_SEEDED, "n": 2}),
    ChaosRequest(
        3,
        "schema",
        [12, 13],
        {
            **_SEEDED,
            "return_token_ids": True,
            "max_tokens": 64,
            "structured_outputs": StructuredOutputsParams(json=_SCHEMA),
        },
    ),
]
# It has to run still when a service is killed behind its first token.
LONG_REQUEST = ChaosRequest(9, "long", [14, 15, 16], {**_EXACT, **_SEEDED, "max_tokens": 200, "n": 2, "logprobs": 1})


class Mixes:
    """The services, of which those named in `others` are of the other version.

    Args:
        other: the folder of the other version.
        folder: gets the services' logs.
    """

    def __init__(self, other: Path, folder: Path) -> None:
        self._other = other
        self.others = {OTHER_GATEWAY}
        self._environments = {OTHER_GATEWAY: {launcher.VARIABLE: str(other)}}
        self.system = System(
            DEMO_FOLDER,
            folder,
            SCHEDULER_FLAGS,
            launcher=launcher.__name__,
            environments=self._environments,
        )

    def replace(self, name: str) -> None:
        """Kills a service and starts its other version."""
        self.others ^= {name}
        self._environments[name] = {launcher.VARIABLE: str(self._other) if name in self.others else ""}
        self.system.services[name].stop(signal.SIGKILL)
        self.system.start_service(name)

    def check_versions(self) -> None:
        """Raises AssertionError unless the other version of each service has run."""
        for name in (OTHER_GATEWAY, *REPLACED):
            assert f" of {self._other}\n" in self.system.log(name), f"no {name} was of the other version"


async def check_mixes(other: Path, folder: Path) -> System:
    """Runs all mixes. Raises AssertionError where an answer differs, or one of the services fails.

    Args:
        other: the folder of the other version.
        folder: gets the services' logs.

    Returns:
        The services, which have ended.
    """
    mixes = Mixes(other, folder)
    with mixes.system as system:
        system.start_service(OTHER_GATEWAY)
        targets = [f"127.0.0.1:{system.port('grpc', name)}" for name in ("gateway", OTHER_GATEWAY)]
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(target)) for target in targets]
            await clients[1].wait_until_ready(START_SECONDS)
            known = await run_alone(clients[0], REQUESTS)
            (long,) = await run_alone(clients[0], [LONG_REQUEST])
            for number, name in enumerate(REPLACED):
                await _read_across(clients, long, f"across-{number}", name, mixes)
                await _check_mix(targets, clients, known, f"mix-{number}")
    mixes.check_versions()
    return system


async def _check_mix(targets: list[str], clients: list[AsyncClient], known: list[Known], name: str) -> None:
    """Runs all requests at both gateways, and once more begun at one gateway and read on at the other."""
    await asyncio.gather(*(check_all(client, known, f"{name}-at-{place}") for place, client in enumerate(clients)))
    pairs = ((targets[0], targets[1]), (targets[1], targets[0]))
    await asyncio.gather(
        *(
            _check_resumed(*pair, one, f"{name}-resumed-{direction}-{one.request.number}")
            for direction, pair in enumerate(pairs)
            for one in known
        )
    )


async def _read_across(clients: list[AsyncClient], long: Known, request_id: str, name: str, mixes: Mixes) -> None:
    """Reads a stream of each gateway while a service is replaced by its other version."""
    transcripts = [Transcript() for _ in clients]
    readings = [
        asyncio.create_task(read_answer(client, long.request, f"{request_id}-at-{place}", transcript))
        for place, (client, transcript) in enumerate(zip(clients, transcripts, strict=True))
    ]
    await until(lambda: all(transcript.num_tokens for transcript in transcripts))
    assert not any(reading.done() for reading in readings)
    mixes.replace(name)
    await asyncio.gather(*readings)
    for transcript in transcripts:
        assert not difference(transcript, long.answer)
        assert transcript.recoveries, f"no stream noticed that the {name} was lost"


async def _check_resumed(begun_at: str, read_at: str, known: Known, request_id: str) -> None:
    """Reads the beginning of an answer at one gateway, and the rest at another one, which says what it has."""
    options: GenerationOptions = {**known.request.options, "request_id": request_id}
    resumption = Resumption(make_spec(known.request.prompt, options), Attempts(RetryPolicy(), None))
    transcript = Transcript()
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(ClientAccess().make_aio_channel(target)) for target in (begun_at, read_at)
        ]
        begun, read = map(inference_pb2_grpc.InferenceServiceStub, channels)
        call = begun.StreamGenerate(resumption.next_request())
        async for message in call:
            if event := resumption.on_message(message.event):
                transcript.take(event)
            if transcript.num_tokens:
                break
        call.cancel()
        rest: Any = resumption.next_request()
        # The gateway has to ask the scheduler for the request.
        rest.ClearField("spec")
        async for message in read.ResumeGenerate(rest):
            if event := resumption.on_message(message.event):
                transcript.take(event)
        resumption.on_end()
    assert not difference(transcript, known.answer)
