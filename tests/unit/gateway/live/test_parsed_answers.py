"""Answers that are parsed: the same events for each of their readers, wherever it begins and at whichever gateway."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.chat import Conversation, Message, Role, Tool
from blockyard.contract.events import Delta, Finished, join_calls
from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Ending
from tests.unit.gateway.core import Core
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

if TYPE_CHECKING:
    from gateway.live.reader import Reader
    from gateway.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{# <tool_call> {\"name\": f, \"arguments\": x} #}{{ '<think>' if think else '' }}"
)
ANSWER = '<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


@functools.cache
def hermes_tokenizer() -> Tokenizer:
    return demo_tokenizer().adapt(None, TEMPLATE, {})


def conversation(**fields: Any) -> Conversation:
    tools = (Tool("f"), Tool("g"))
    return Conversation((Message(Role.USER, "Hi"),), **{"tools": tools, "parse_answer": True, **fields})


class Told:
    """What a reader was told."""

    def __init__(self, reader: Reader) -> None:
        self.deltas: list[Delta] = []
        self.finished: list[Finished] = []
        self.reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: Reader) -> None:
        async for event in reader:
            if isinstance(event, Delta):
                self.deltas.append(event)
            elif isinstance(event, Finished):
                self.finished.append(event)

    def after(self, number: int) -> tuple[str, str, list[tuple[int, str, str]]]:
        """The text, the reasoning and the calls of the deltas from this number on."""
        deltas = self.deltas[number:]
        calls = [(index, call.name, call.arguments) for index, call in enumerate(join_calls(deltas))]
        return "".join(each.text for each in deltas), "".join(each.reasoning_text for each in deltas), calls


async def told(core: Core, reader: Reader, answer: str, *last: int) -> Told:
    """What a reader is told of an answer that comes token by token."""
    told = Told(reader)
    for token_id in (*ids_of(answer), *last):
        core.tokens(core.first, token_id)
        await asyncio.sleep(0)
    core.told(ended=[Ending(core.first, FinishReason.STOP)])
    await told.reading
    return told


async def test_the_parts_of_an_answer_come_apart() -> None:
    core = Core(tokenizer=hermes_tokenizer())
    first = await told(core, await core.accepted(prompt=conversation()), ANSWER, END_TOKEN)
    assert first.after(0) == ("Let me see.", "Hm.", [(0, "f", '{"x": "é"}')])
    assert len(first.deltas) > 5
    assert first.finished[0].calls_tools
    assert first.deltas[-1].num_text_bytes <= len(ANSWER.encode())


@pytest.mark.parametrize("answer", [ANSWER, "A text <tool", "Spaces  \n"])
@pytest.mark.parametrize("last", [(END_TOKEN,), ()])
async def test_a_reader_that_begins_anywhere_is_told_the_rest(answer: str, last: tuple[int, ...]) -> None:
    core = Core(tokenizer=hermes_tokenizer())
    first = await told(core, await core.accepted(prompt=conversation()), answer, *last)
    for number, delta in enumerate(first.deltas):
        positions = {0: Position(delta.num_tokens, delta.num_text_bytes)}
        rest = Told(await core.resume("r", positions=positions))
        again = Told(await core.resume("r", positions=positions, replay=True))
        await asyncio.gather(rest.reading, again.reading)
        assert rest.after(0) == first.after(number + 1)
        assert again.after(0) == first.after(0)


async def test_what_comes_at_once_is_told_in_its_order_and_read_on_from_between() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
    core = Core(tokenizer=hermes_tokenizer())
    reader = await core.accepted(prompt=conversation(), return_token_ids=True)
    broken = call.replace("}}", '}, "é')
    core.tokens(core.first, *ids_of(f"Ä.{call}\nB.{call}C.{broken}"), END_TOKEN)
    core.told(ended=[Ending(core.first, FinishReason.STOP)])
    first = Told(reader)
    await first.reading
    assert [(each.text, [piece.index for piece in each.tool_calls]) for each in first.deltas] == [
        ("Ä.", [0]),
        ("B.", [1]),
        ("C.", [2]),
        (', "é', []),
    ]
    assert [len(each.token_ids) > 0 for each in first.deltas] == [True, False, False, False]
    for number, delta in enumerate(first.deltas):
        positions = {0: Position(delta.num_tokens, delta.num_text_bytes)}
        rest = Told(await core.resume("r", positions=positions))
        await rest.reading
        assert rest.after(0) == first.after(number + 1)


async def test_what_a_request_asks_besides_counts_for_the_cost_of_keeping_it() -> None:
    weights = {}
    for size in (10, 40_000):
        tools = (Tool("f", parameters=f'{{"title": "{"a" * size}"}}'),)
        reader = await Core(tokenizer=hermes_tokenizer()).start(
            prompt=conversation(tools=tools), front_state=b"x" * size
        )
        weights[size] = reader.state.weight
    # The tool's schema, and twice what the front repeats: once for other gateways.
    assert 3 * 40_000 / 4 <= weights[40_000] - weights[10] + 30 < 4 * 40_000 / 4
