"""Renders messages with a model's Jinja chat template, in a sandbox. Knows nothing of tokens.

The environment is the one that templates are written for (`transformers`, `apply_chat_template`): trimmed blocks, loop
controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and the `generation` tag, which marks text
for training and renders its body.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from gateway.text.template_roles import find_roles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.parser import Parser

log = EventLogger(__name__)

_MAX_REASON_CHARACTERS = 150


class _GenerationTag(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Replaces the tag with its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportArgumentType]
    environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportArgumentType]
    return environment


class ChatTemplate:
    """A template and the special tokens that it uses (`bos_token`, …).

    Attributes:
        source: the template's text.
        roles: the orders of roles that it accepts, found by rendering some conversations.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles the template; raises BlockyardError MODEL_NOT_LOADED for an invalid one."""
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BlockyardError(
                Reason.MODEL_NOT_LOADED, f"the chat template is broken, line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, SyntaxError, MemoryError):
            # Jinja's parser calls itself, and Python compiles only some twenty loops within each other.
            raise BlockyardError(Reason.MODEL_NOT_LOADED, "the chat template is nested too deep") from None
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.roles = find_roles(self.render)
        if changes := self.roles.describe():
            log.info("the chat template does not accept every order of messages", changes=changes)

    def render(self, /, **variables: Any) -> str:
        """Renders the template with variables of any name.

        Raises BlockyardError FIELD_INVALID if the template refuses the messages.
        """
        try:
            return self._template.render({**self._special_tokens, **variables})
        except Exception as error:
            reason = str(error)[:_MAX_REASON_CHARACTERS]
            refusal = Violation("conversation.messages", f"the model's chat template refuses them: {reason}")
            raise invalid([refusal]) from error
