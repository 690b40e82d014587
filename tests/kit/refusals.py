"""The error that a call to one of our services ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from blockyard.errors import from_rpc_error

if TYPE_CHECKING:
    from blockyard.errors import BlockyardError


async def refused(call: Any) -> BlockyardError:
    """Waits for a call, or for the first message of a stream, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return from_rpc_error(raised.value)
