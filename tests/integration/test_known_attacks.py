"""Published attacks on other servers, replayed here: each gets its verdict, and nobody else notices."""

from __future__ import annotations

import asyncio
import base64
import pickle
import re
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import AsyncClient
from blockyard.contract.events import Delta, Recovered
from tests.kit.processes.system import System
from tests.security.attack import MARK, PICKLED
from tests.security.known_attacks import GROUPS, PAGE, make_page
from tests.security.replays import BY, DEMO, Attacked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.attack import Attack

ATTACKS = [attack for attacks in GROUPS.values() for attack in attacks]
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "50", "--max-loras", "2"]
INNOCENT: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder = tmp_path_factory.mktemp("attacked")
    root = folder / "root"
    root.mkdir()
    worker_flags = ["--num-threads", "1", "--worker-lora-root", str(root)]
    gateway_flags = ["--gateway-lora-root", str(root), "--dialect", "hermes"]
    MARK.unlink(missing_ok=True)
    with System(DEMO, folder / "logs", FLAGS, worker_flags, gateway_flags) as system:
        attacked = Attacked(system, folder, [])

        async def answer() -> None:
            async with AsyncClient(system.grpc_target) as client:
                attacked.alone.extend((await client.generate("Once upon a time", **INNOCENT)).token_ids)

        asyncio.run(answer())
        yield attacked


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_gets_its_verdict_and_nobody_else_notices(attack: Attack, attacked: Attacked) -> None:
    before, name = (attacked.processes(), attacked.epoch()), re.sub("[^a-z]", "-", attack.name.lower())
    begun, over = asyncio.Event(), asyncio.Event()

    async def follow(client: AsyncClient) -> int:
        num_answers = 0
        while not over.is_set():
            token_ids: list[int] = []
            async for event in client.stream(
                "Once upon a time", request_id=f"innocent-{name}-{num_answers}", **INNOCENT
            ):
                assert not isinstance(event, Recovered)
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                    begun.set()
            assert token_ids == attacked.alone
            num_answers += 1
        return num_answers

    async with AsyncClient(attacked.system.grpc_target) as client:
        following = asyncio.create_task(follow(client))
        await asyncio.wait([asyncio.create_task(begun.wait()), following], return_when=asyncio.FIRST_COMPLETED)
        try:
            verdicts = [await asyncio.to_thread(attacked.verdict, ask) for ask in attack.asks]
            if attack.by:
                await asyncio.to_thread(BY[attack.by], attacked)
        finally:
            over.set()
            assert await following > 0
    assert verdicts == [str(ask.verdict) for ask in attack.asks]
    assert (attacked.processes(), attacked.epoch()) == before
    assert not attacked.has_run_code()


def test_code_that_runs_would_leave_its_mark(attacked: Attacked) -> None:
    pickle.loads(base64.b64decode(PICKLED)).close()
    assert attacked.has_run_code()
    MARK.unlink()


def test_each_function_belongs_to_an_attack() -> None:
    assert sorted(BY) == sorted(attack.by for attack in ATTACKS if attack.by)
    assert all(bool(attack.asks) != bool(attack.by) for attack in ATTACKS)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "python -m tests.security.known_attacks"
