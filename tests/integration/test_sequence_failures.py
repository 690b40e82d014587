"""A sequence that cannot go on says why: over both fronts, alone and beside others, sampled and searched."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import BeamSearch, Client
from blockyard.contract.events import Finished
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from blockyard.client.sync import Stream
    from tests.kit.processes.system import System

END_TOKEN = 0
PROMPT = "Once upon a time"
# Legal, and yet nothing can come: the only token that is allowed may not come before the third.
IMPOSSIBLE: dict[str, Any] = {"allowed_token_ids": [END_TOKEN], "min_tokens": 3, "max_tokens": 8}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"n": 2, "beam_search": BeamSearch(2)}], ids=["one", "two", "beams"])
def test_a_request_that_leaves_no_token_fails(client: Client, more: dict[str, Any]) -> None:
    with pytest.raises(BlockyardError) as raised:
        client.generate(PROMPT, **IMPOSSIBLE, **more)
    assert raised.value.reason is Reason.NO_TOKEN_POSSIBLE
    told = read(client.stream(PROMPT, **IMPOSSIBLE, **more, request_id=f"impossible-{len(more)}"))
    assert told == [Reason.NO_TOKEN_POSSIBLE] * more.get("n", 1)
    # Who asks again is told the same.
    assert read(client.resume(f"impossible-{len(more)}")) == told


def read(stream: Stream) -> list[Reason]:
    """Why the sequences of a stream failed; and so does the stream, at its end."""
    events: list[Any] = []
    with pytest.raises(BlockyardError) as raised:
        collect(stream, events)
    assert raised.value.reason is Reason.NO_TOKEN_POSSIBLE
    return [event.error.reason for event in events if isinstance(event, Finished) and event.error]


def collect(stream: Stream, events: list[Any]) -> None:
    for event in stream:
        events.append(event)


def test_over_http_it_is_an_error_with_its_status(demo: System) -> None:
    body = {"prompt": PROMPT, "model": "demo", **IMPOSSIBLE}
    status, told = post(demo, body)
    assert (status, told["error"]["code"]) == (412, "NO_TOKEN_POSSIBLE")
    status, text = post_stream(demo, body)
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "NO_TOKEN_POSSIBLE"
    [end] = [choice for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert (end["finish_reason"], end["error"]["code"]) == ("error", "NO_TOKEN_POSSIBLE")


def post(system: System, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, text = post_stream(system, body, stream=False)
    return status, json.loads(text)


def post_stream(system: System, body: dict[str, Any], *, stream: bool = True) -> tuple[int, str]:
    data = json.dumps({**body, "stream": stream}).encode()
    request = urllib.request.Request(f"{system.http_url}/v1/completions", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
