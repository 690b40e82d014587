"""Runs a coding agent behind a proxy that makes the model call the agent's shell once, with a command that is given.

python forced_agent.py AGENT COMMAND PROGRAM [ARGUMENT ...]

The demo model cannot choose tools. The proxy forces the call and, by the tool's schema, its arguments; it forbids tools
once the agent has answered. Everything else passes through as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

URL, SHELL, FIELD, RESULT = "ANTHROPIC_BASE_URL", "Bash", "command", "tool_result"
# The last answer: the demo model would not end by itself.
END = {"const": "done"}
CODEX_URL, CODEX_SHELL, CODEX_FIELD = "model_providers.blockyard.base_url=", "exec_command", "cmd"


def exactly(field: str, command: str) -> dict[str, Any]:
    """The schema of arguments that leaves nothing to choose."""
    fields = {field: {"const": command}}
    return {"type": "object", "properties": fields, "required": [field], "additionalProperties": False}


def force_claude(body: dict[str, Any], command: str) -> None:
    tools = {tool["name"]: tool for tool in body.get("tools", [])}
    if SHELL not in tools:
        return
    body.pop("thinking", None)
    parts = [part for turn in body["messages"] if isinstance(turn["content"], list) for part in turn["content"]]
    if any(part["type"] == RESULT for part in parts):
        body |= {"tool_choice": {"type": "none"}, "output_config": {"format": {"type": "json_schema", "schema": END}}}
        return
    body["tool_choice"] = {"type": "tool", "name": SHELL, "disable_parallel_tool_use": True}
    tools[SHELL]["input_schema"] = exactly(FIELD, command)


def force_codex(body: dict[str, Any], command: str) -> None:
    tools = {tool["name"]: tool for tool in body.get("tools", []) if "name" in tool}
    if any(item["type"] == "function_call_output" for item in body["input"]):
        form = {"type": "json_schema", "name": "end", "schema": END, "strict": False}
        body |= {"tool_choice": "none", "text": {"format": form}}
        return
    body |= {"tool_choice": {"type": "function", "name": CODEX_SHELL}, "parallel_tool_calls": False}
    tools[CODEX_SHELL]["parameters"] = exactly(CODEX_FIELD, command)


FORCES = {"/v1/messages": force_claude, "/v1/responses": force_codex}


def make_proxy(url: str, command: str) -> Starlette:
    client = httpx.AsyncClient(base_url=url, timeout=600)

    async def pass_on(request: Request) -> StreamingResponse:
        content = await request.body()
        if force := FORCES.get(request.url.path):
            body = json.loads(content)
            force(body, command)
            content = json.dumps(body).encode()
        not_passed = {"host", "content-length", "accept-encoding"}
        headers = {name: value for name, value in request.headers.items() if name not in not_passed}
        address = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = client.build_request(request.method, address, headers=headers, content=content)
        answer = await client.send(asked, stream=True)
        kind = answer.headers.get("content-type")
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind)

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["GET", "HEAD", "POST"])])


async def main(agent: str, command: str, *line: str) -> int:
    if agent == "claude":
        url = os.environ[URL]
    else:
        url = json.loads(next(part for part in line if part.startswith(CODEX_URL)).removeprefix(CODEX_URL))
    server = uvicorn.Server(uvicorn.Config(make_proxy(url.removesuffix("/v1"), command), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    here = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    more = [] if agent == "claude" else ["-c", f"{CODEX_URL}{json.dumps(here + '/v1')}"]
    process = await asyncio.create_subprocess_exec(*line, *more, env={**os.environ, URL: here})
    code = await process.wait()
    server.should_exit = True
    await serving
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
