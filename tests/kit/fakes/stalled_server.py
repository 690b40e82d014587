"""A gRPC server in a process of its own whose event loop stands still when the test says so; it answers health alone.

What a service's process does while Python is busy for seconds is then up to gRPC's own threads.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.service import grpc_environment
from blockyard.service import servers as rpc
from blockyard.service.health import add_health

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_ROOT = Path(__file__).parents[3]
_STALL, _STALLED, _GO_ON = b"stall\n", b"stalled\n", b"go on\n"


class StalledServer:
    """The process, as the test has it. `port`: where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.port = port

    async def stall(self) -> None:
        """Has its loop stand still; returns when it does."""
        self._stdin.write(_STALL)
        async with asyncio.timeout(10):
            assert await self._stdout.readline() == _STALLED

    def go_on(self) -> None:
        """Has its loop turn again."""
        self._stdin.write(_GO_ON)


@asynccontextmanager
async def stalled_server() -> AsyncGenerator[StalledServer]:
    """Runs one; its loop turns."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.fakes.stalled_server"),
        stdin=pipe,
        stdout=pipe,
        cwd=_ROOT,
        env=_environment(),
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            port = int(await process.stdout.readline())
        yield StalledServer(process, port)
    finally:
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """That of a service: what gRPC reads of it when it is imported."""
    return {**os.environ, "GRPC_EXPERIMENTS": grpc_environment.EXPERIMENTS}


def _stand_still() -> None:
    sys.stdin.readline()
    sys.stdout.buffer.write(_STALLED)
    sys.stdout.flush()
    sys.stdin.readline()


async def _serve() -> None:
    server = rpc.make_server(PUBLIC_MESSAGE_BYTES, [])
    add_health(server, lambda: True, lambda: True)
    sys.stdout.write(f"{rpc.bind(server, '127.0.0.1:0')}\n")
    sys.stdout.flush()
    await server.start()
    asyncio.get_running_loop().add_reader(sys.stdin, _stand_still)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
