"""What the families' chat templates write of a call comes out of the scanner again, as transformers renders them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from blockyard.errors import BlockyardError
from gateway.dialects.table import BY_NAME, choose_dialect, find_dialect
from gateway.text.chat_template import ChatTemplate
from gateway.text.round_trip import RoundTrip, main, try_round_trip
from tests.unit.gateway.dialects.templates import TEMPLATES
from tests.unit.gateway.harness import DEMO_MODEL

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Transformers:
    """Renders a template as `apply_chat_template` of transformers does."""

    def __init__(self, template: str) -> None:
        self._template = template

    def apply_chat_template(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        rendered, _ = render_jinja_template([messages], chat_template=self._template, **TOKENS, **options)
        return rendered[0]


class Ours:
    """Renders it as the gateway does."""

    def __init__(self, template: str) -> None:
        self._template = ChatTemplate(template, TOKENS)

    def apply_chat_template(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        return self._template.render(messages=messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("renderer", [Transformers, Ours])
def test_a_call_that_a_template_writes_comes_out_again(renderer: Any, name: str) -> None:
    dialect, template = TEMPLATES[name]
    assert find_dialect(template) is BY_NAME[dialect]
    assert try_round_trip(renderer(template), BY_NAME[dialect]) == RoundTrip(dialect)


def test_a_wrong_dialect_is_found() -> None:
    for name, (dialect, template) in TEMPLATES.items():
        wrong = BY_NAME["deepseek" if dialect != "deepseek" else "hermes"]
        assert try_round_trip(Ours(template), wrong).problem, name


def test_a_template_that_refuses_is_told() -> None:
    told = try_round_trip(Ours("{{ raise_exception('no tools here') }}"), BY_NAME["hermes"])
    assert "no tools here" in told.problem


def test_a_template_without_calls_speaks_no_dialect() -> None:
    assert find_dialect("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert choose_dialect("none", TEMPLATES["glm"][1]) is None
    assert choose_dialect("harmony", "") is BY_NAME["harmony"]
    with pytest.raises(BlockyardError, match=r"--dialect chatml is unknown: choose one of auto, none, harmony"):
        choose_dialect("chatml", "")


def test_the_program_prints_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text(TEMPLATES["hermes, Qwen3"][1])
    for given, dialect in ((str(template), "auto"), ("", "auto"), ("", "kimi")):
        main([str(DEMO_MODEL), given, dialect])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == '{"dialect": "hermes", "problem": "", "roles": ""}'
    assert second == '{"dialect": "", "problem": "", "roles": ""}'
    assert "of a call that the template writes nothing comes out" in third
