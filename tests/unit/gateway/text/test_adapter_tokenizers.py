"""Adapters that bring their own tokenizer or chat template: theirs make the ids and the texts of their requests."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import tokenizers

from blockyard.contract.chat import Conversation, Message, Role
from blockyard.contract.events import Delta
from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Adapter
from blockyard.errors import BlockyardError, Reason
from gateway.request import GenerationRequest
from tests.kit.hostile_paths import PATHS, TYPED, lay_traps
from tests.unit.gateway.core import Core
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
CHAT = Conversation((Message(Role.USER, "hi"),))


def write_tokenizer(folder: Path, *words: str) -> None:
    """The demo model's tokenizer, with more words."""
    backend = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    backend.add_special_tokens(list(words))
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[0]}))


def swapped(folder: Path) -> None:
    """The demo model's tokenizer with the ids of two letters swapped."""
    stored = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(stored))


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    for name in ("plain", "templated"):
        (tmp_path / name).mkdir()
    (tmp_path / "templated" / "chat_template.jinja").write_text(TEMPLATE)
    swapped(tmp_path / "swapped")
    write_tokenizer(tmp_path / "large", *(f"<extra{number}>" for number in range(4096)))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    (tmp_path / "link").symlink_to(DEMO_MODEL)
    core = Core(lora_root=tmp_path)
    names = ("plain", "templated", "swapped", "large", "damaged", "link", "nowhere")
    core.link.loras = {
        name: Adapter(number, name, str(tmp_path / name), "ab" * 32) for number, name in enumerate(names, 1)
    }
    yield core
    core.service.stop(BlockyardError(Reason.DRAINING, "the test is over"))


async def prompt_of(core: Core, model: str, prompt: str | Conversation) -> tuple[int, ...]:
    return tuple(await core.service.prompt_of(GenerationRequest(prompt, model=model, add_special_tokens=False)))


async def test_what_an_adapter_does_not_bring_is_the_models(core: Core) -> None:
    tokenizer = demo_tokenizer()
    assert await prompt_of(core, "plain", "ab cab") == tuple(tokenizer.encode("ab cab", False))
    assert await prompt_of(core, "plain", CHAT) == await prompt_of(core, "", CHAT)
    assert await prompt_of(core, "templated", "ab cab") == tuple(tokenizer.encode("ab cab", False))
    assert await prompt_of(core, "templated", CHAT) == tuple(tokenizer.encode("[hi]", False))
    assert await core.service.find_tokenizer("plain") is core.service.model_of("").tokenizer


async def test_an_adapters_tokenizer_makes_its_ids_and_its_texts(core: Core) -> None:
    (b,) = demo_tokenizer().encode("b", False)
    assert await prompt_of(core, "swapped", "a") == (b,)
    reader = await core.accepted(prompt="a", model="swapped", add_special_tokens=False)
    assert tuple(core.link.adds[-1].submission.prompt_token_ids) == (b,)
    core.tokens(core.first, b, end=FinishReason.LENGTH)
    assert [event.text for event in [event async for event in reader] if isinstance(event, Delta)] == ["a"]


@pytest.mark.parametrize(
    ("name", "reason", "part"),
    [
        ("large", Reason.MODEL_NOT_LOADED, "the tokenizer of the adapter 'large' has 8192 ids and the model 4096"),
        ("damaged", Reason.MODEL_NOT_LOADED, "tokenizer.json is damaged"),
        ("link", Reason.PERMISSION_DENIED, "is not below --gateway-lora-root"),
        ("nowhere", Reason.MODEL_NOT_LOADED, "the gateway does not find the folder"),
    ],
)
async def test_one_that_cannot_be_used_is_refused_by_name(core: Core, name: str, reason: Reason, part: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        await core.start(model=name)
    assert raised.value.reason is reason
    assert part in raised.value.message
    assert core.link.adds == []


async def test_one_that_cannot_be_used_is_not_loaded(core: Core) -> None:
    with pytest.raises(BlockyardError, match="8192 ids"):
        await core.service.model_of("").check_tokenizer("new", "large")
    for path in ("plain", "swapped"):
        await core.service.model_of("").check_tokenizer("new", path)


async def test_without_a_root_all_have_the_models(tmp_path: Path) -> None:
    core = Core()
    core.link.loras = {"sql": Adapter(1, "sql", "/nowhere", "ab" * 32)}
    assert await core.service.find_tokenizer("sql") is core.service.model_of("").tokenizer
    await core.service.model_of("").check_tokenizer("sql", "/nowhere")
    core.service.stop(BlockyardError(Reason.DRAINING, "the test is over"))


async def test_a_card_tells_of_the_template_once_it_was_read(core: Core) -> None:
    await core.service.find_tokenizer("templated")
    cards = {card.name: card.has_chat_template for card in core.service.models()}
    assert cards["templated"]


@pytest.mark.parametrize("what", PATHS)
async def test_a_hostile_path_is_refused_with_a_typed_error(core: Core, tmp_path: Path, what: str) -> None:
    lay_traps(tmp_path)
    with pytest.raises(BlockyardError) as raised:
        await core.service.model_of("").check_tokenizer("a", PATHS[what])
    assert raised.value.reason in TYPED


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "link out of the root", "device", "not UTF-8"])
async def test_files_are_regular_ones_below_the_root(core: Core, tmp_path: Path, file: str, kind: str) -> None:
    folder = tmp_path / "plain"
    if file == "merges.txt":
        (folder / "vocab.json").write_text('{"a": 0}')
    elif file != "tokenizer.json":
        shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "not UTF-8":
        (folder / file).write_bytes(b"\xff\xff")
    else:
        outside = tmp_path.parent / f"{tmp_path.name}-outside"
        outside.write_text("{}")
        (folder / file).symlink_to("/dev/zero" if kind == "device" else outside)
    with pytest.raises(BlockyardError) as raised:
        await core.service.model_of("").check_tokenizer("plain", "plain")
    assert raised.value.reason is Reason.MODEL_NOT_LOADED
