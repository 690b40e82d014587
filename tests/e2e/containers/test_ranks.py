"""The profile `tp2`: two workers that are one replica answer as one worker alone, and outlive each other."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient
from tests.e2e.containers.streams import Streams, make_requests
from tests.kit.oracles.answers import run_alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes.containers import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
NUM_STREAMS = 4


@contextmanager
def started(project: Project, profile: str) -> Iterator[None]:
    """A profile's services, healthy."""
    project.environment["COMPOSE_PROFILES"] = profile
    try:
        project.up()
        yield
    finally:
        project.down()
        del project.environment["COMPOSE_PROFILES"]


async def test_two_ranks_answer_as_one_worker_and_outlive_each_other(project: Project) -> None:
    with started(project, "cpu"):
        async with AsyncClient(project.grpc_target) as client:
            await client.wait_until_ready(60)
            known = await run_alone(client, make_requests(NUM_STREAMS))
    with started(project, "tp2"):
        async with AsyncClient(project.grpc_target) as client:
            await client.wait_until_ready(60)
            async with Streams(client, known, "ranks") as streams:
                assert await streams.differences() == []
            for name in ("worker-0", "worker-1"):
                rank = project.container(name)
                async with Streams(client, known, f"without-{name}") as streams:
                    os.kill(rank.attrs["State"]["Pid"], signal.SIGKILL)
                    assert await streams.differences() == []
                    assert all(len(transcript.recoveries) == 1 for transcript in streams.transcripts)
                    assert all(transcript.recoveries[0].exact for transcript in streams.transcripts)
                rank.reload()
                assert rank.attrs["RestartCount"] == 1
