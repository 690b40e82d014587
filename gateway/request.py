"""A client's request with the fields that only the gateway uses, the ids of requests, and their cache salts.

Knows no messages.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.contract.events import TokenLogprob
from blockyard.contract.request import GenerationSpec, Position
from blockyard.errors import Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.dialects.answer_parser import ParsingRule

REQUEST_ID_RULE = "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
REQUEST_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
MAX_SALT_CHARACTERS = 256
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


@dataclass(frozen=True, slots=True)
class GenerationRequest(GenerationSpec):
    """A client's request with the fields that the gateway adds.

    Attributes:
        tenant: the caller's tenant; empty: none.
        remaining_seconds: the time until the client's deadline; None: no deadline.
        front_state: bytes from which the front can write the answer again, also at another gateway; the core does not
            read them.
        warnings: sentences about parts of the request that are not served as requested; filled in by the core.
        prediction: a text that the answer may repeat in part; the core makes `predicted_token_ids` of it.
        parsing: how to split the answer into text, reasoning and tool calls; None: the answer is plain text. Filled in
            by the core for conversations that ask for parsing.
    """

    tenant: str = ""
    remaining_seconds: float | None = None
    front_state: bytes = b""
    warnings: tuple[str, ...] = ()
    prediction: str = ""
    parsing: ParsingRule | None = None

    @property
    def has_form(self) -> bool:
        """Whether a grammar constrains the answer."""
        needs_calls = self.parsing is not None and self.parsing.needs_grammar
        return self.format is not None or bool(self.sampling.grammar) or needs_calls


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks for the rest of an answer.

    `positions`: the client's positions by the sequence's index; other sequences are read from their beginning.
    `request`: the original request with its seed, to generate an answer again that no server knows any more.
    """

    request_id: str
    tenant: str = ""
    positions: Mapping[int, Position] = field(default_factory=dict[int, "Position"])
    request: GenerationRequest | None = None


@dataclass(slots=True)
class ReturnedLogprob(TokenLogprob):
    """A token's log probability with `raw`, the UTF-8 bytes that the token adds to the answer's text.

    A skipped special token adds no bytes.
    """

    raw: bytes = b""


def raw_of(token: TokenLogprob) -> bytes:
    """Returns the bytes that a token adds to the answer's text."""
    return token.raw if isinstance(token, ReturnedLogprob) else b""


def is_request_id(name: str) -> bool:
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises BlockyardError FIELD_INVALID for an invalid request id."""
    if not is_request_id(name):
        raise invalid([Violation("request_id", REQUEST_ID_RULE)])


def wire_id(tenant: str, request_id: str) -> str:
    """Returns a request's name for the scheduler: `tenant/id`, or the id without a tenant. Tenants contain no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def client_id(tenant: str, name: str) -> str:
    """Returns a request's id as its client knows it, from its name for the scheduler: the reverse of `wire_id`."""
    return name.removeprefix(f"{tenant}/") if tenant else name


def derive_cache_salt(tenant: str, cache_salt: str) -> bytes:
    """Returns the salt by which the scheduler parts prefixes; empty if there is neither a tenant nor a client's salt.

    `tenant`: the tenant whose requests share prefixes; empty: the tenants share them.
    """
    # A tenant has no slash: no client's salt looks like that of a tenant.
    text = f"{tenant}/{cache_salt}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() if tenant or cache_salt else b""
