"""A small streaming HTTP client for the OpenAI API, with one connection per request and no dependencies."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

MAX_LINE_BYTES = 16 * 1024 * 1024


@asynccontextmanager
async def _open(url: str, body: Any, extra: Mapping[str, str]) -> AsyncGenerator[AsyncGenerator[bytes]]:
    """Sends a request (GET without a body, else POST) and yields the pieces of the answer's body.

    Raises BlockyardError: the server's error, or NO_READY_WORKER if the server cannot be reached.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    try:
        context = ssl.create_default_context() if secure else None
        reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=MAX_LINE_BYTES)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise _make_connection_error(f"{host}:{port} does not speak TLS as expected: {reason}") from None
    except OSError as error:
        raise _make_connection_error(f"cannot connect to {host}:{port}: {error.strerror or error}") from None
    try:
        writer.write(_head_and_body(parts.path or "/", {"Host": parts.netloc, **extra}, body))
        status, headers = await _read_head(reader)
        pieces = _read_body(reader, headers)
        if status != 200:
            raise _make_error(status, headers, b"".join([piece async for piece in pieces]))
        yield pieces
    except asyncio.IncompleteReadError:
        raise _make_connection_error(f"{host}:{port} closed the connection in the midst of its answer") from None
    except (OSError, EOFError) as error:
        raise _make_connection_error(f"{host}:{port} closed the connection: {error}") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _make_connection_error(message: str) -> BlockyardError:
    return BlockyardError(Reason.NO_READY_WORKER, message, metadata=dict(TRANSPORT_ORIGIN))


def _head_and_body(path: str, headers: Mapping[str, str], body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(64 * 1024):
            yield piece


def _make_error(status: int, headers: dict[str, str], content: bytes) -> BlockyardError:
    try:
        content_error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return BlockyardError(Reason.BUG, f"HTTP {status}: {content[:200].decode('utf-8', 'replace')}")
    reason, retry_after = content_error.get("reason", content_error.get("code")), headers.get("retry-after")
    return BlockyardError(
        Reason(reason) if reason in Reason.__members__ else Reason.BUG,
        content_error.get("message", f"HTTP {status}"),
        retry_after_seconds=float(retry_after) if retry_after and retry_after.isdecimal() else None,
    )


async def get_json(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Gets a JSON object. `headers`: additional request headers. Raises BlockyardError."""
    async with _open(url, None, headers) as pieces:
        return cast("dict[str, Any]", json.loads(b"".join([piece async for piece in pieces])))


async def post_events(
    url: str, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
) -> AsyncGenerator[dict[str, Any]]:
    """Posts a request and yields its server-sent events, up to `[DONE]`. Closing it early closes the connection.

    `headers`: additional request headers.

    Raises BlockyardError if the server refuses the request, sends an error within the stream, or breaks the stream off.
    """
    async with _open(url, body, headers) as pieces:
        rest = b""
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise _make_error(200, {}, data)
                yield event
    raise BlockyardError(Reason.BUG, "the stream ended before its answer did")
