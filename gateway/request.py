"""A request with what only a gateway knows of it, and the names of requests. Knows no messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.contract.events import TokenLogprob
from blockyard.contract.request import GenerationSpec
from blockyard.errors import Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.request import Position
    from gateway.dialects.answer_parser import ParsingRule

REQUEST_ID_RULE = "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
REQUEST_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


@dataclass(frozen=True, slots=True)
class GenerationRequest(GenerationSpec):
    """A request of a client, and what the gateway adds.

    Attributes:
        tenant: who asks.
        remaining_seconds: until the client's own deadline; None: it has none.
        front_state: what the front that took the request needs to write its answer again, at another gateway too; the
            core does not read it.
        warnings: what is not done as the request asked, a sentence each; filled in by the core.
        parsing: how the answer is split into text, reasoning and calls of tools; None: it is text. The core fills it in
            for a conversation that asks for it.
    """

    tenant: str = ""
    remaining_seconds: float | None = None
    front_state: bytes = b""
    warnings: tuple[str, ...] = ()
    parsing: ParsingRule | None = None

    @property
    def has_form(self) -> bool:
        """Whether the answer must have a form, which a grammar holds it to."""
        needs_calls = self.parsing is not None and self.parsing.needs_grammar
        return self.format is not None or bool(self.sampling.grammar) or needs_calls


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks for the rest of an answer; `positions` are by index, and a sequence without one is read from its beginning.

    With `request`, which has its seed then, an answer that no server remembers is generated again.
    """

    request_id: str
    tenant: str = ""
    positions: Mapping[int, Position] = field(default_factory=dict[int, "Position"])
    request: GenerationRequest | None = None


@dataclass(slots=True)
class ReturnedLogprob(TokenLogprob):
    """A token's log probability with `raw`: the bytes of UTF-8 that the token adds to the text that is returned.

    A special token that is left out adds none.
    """

    raw: bytes = b""


def raw_of(token: TokenLogprob) -> bytes:
    """Returns the bytes that a token adds to the text that is returned."""
    return token.raw if isinstance(token, ReturnedLogprob) else b""


def is_request_id(name: str) -> bool:
    """Returns whether a client may give a request this name."""
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises BlockyardError FIELD_INVALID for a name that a request cannot have."""
    if not is_request_id(name):
        raise invalid([Violation("request_id", REQUEST_ID_RULE)])


def wire_id(tenant: str, request_id: str) -> str:
    """Returns the name of a request for the scheduler: the tenant, whose name has no slash in it, and its id."""
    return f"{tenant}/{request_id}" if tenant else request_id
