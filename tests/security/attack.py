"""One published attack: what it did elsewhere, and the requests that replay it here."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.errors import Reason

GRPC = "gRPC"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, TOKENIZE, GENERATE = "/v1/messages", "/tokenize", "/v2/models/demo/generate"
ANSWERED = "answered"
INVALID, UNSUPPORTED = Reason.FIELD_INVALID, Reason.UNSUPPORTED_PARAMETER
NO_MODEL, TOO_LARGE, TOO_LONG = Reason.MODEL_NOT_FOUND, Reason.MESSAGE_TOO_LARGE, Reason.PROMPT_TOO_LONG
NO_ROUTE = "404"

HUGE = 2**31 - 1
FOREIGN = 2**32 - 1


# What code of an attack leaves behind if it runs.
MARK = Path(tempfile.gettempdir()) / f"blockyard-attack-{os.getpid()}"


class Payload:
    """Unpickled, it leaves the mark."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(MARK), "w")


PICKLED = base64.b64encode(pickle.dumps(Payload())).decode()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: fields that are changed in a good one of its front, or a whole body; and its verdict."""

    front: str
    body: dict[str, Any] | bytes
    verdict: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    `numbers`: those under which it was published. `there`: what it did. `here`: what is sent here, and what comes of
    it. `asks`: the requests; or `by`: the test's function that does what no single body can.
    """

    name: str
    server: str
    numbers: tuple[str, ...]
    there: str
    here: str
    asks: tuple[Ask, ...] = ()
    by: str = ""


def everywhere(verdict: str, **fields: Any) -> tuple[Ask, ...]:
    """The same fields over the fronts that have vLLM's names, and in the parameters of Open Inference."""
    return (
        *(Ask(front, fields, verdict) for front in (COMPLETIONS, CHAT)),
        Ask(GENERATE, {"parameters": fields}, verdict),
    )


def conversation(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}
