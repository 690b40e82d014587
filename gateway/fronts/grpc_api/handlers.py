"""Registers the gateway's gRPC servicers, and finds the tenant of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from blockyard.errors import BlockyardError, Violation, invalid
from blockyard.headers import TENANT_KEY
from gateway.call_context import check_tenant, with_grpc_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def tenant_of(context: Any) -> str:
    """Returns the tenant of a call; raises BlockyardError FIELD_INVALID."""
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    return check_tenant(metadata.get(TENANT_KEY))


def add_service(server: grpc.aio.Server, service: Any, servicer: Any) -> None:
    """Registers a servicer, and answers requests that cannot be parsed (a string is not UTF-8) with FIELD_INVALID.

    grpc itself would answer INTERNAL, as if the fault were the server's. In a stream of requests, the servicer gets a
    BlockyardError in place of such a request.

    Args:
        server: the server; it must not have started.
        service: the service's descriptor.
        servicer: an object with a coroutine function for each method.
    """
    handlers = {method.name: _handler(method, servicer) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    # Registered methods have separate queues: a cancel then does not wait behind thousands of new requests, which a
    # busy event loop takes slowly.
    server.add_registered_method_handlers(service.full_name, handlers)  # type: ignore[attr-defined]


def _handler(method: Any, servicer: Any) -> grpc.RpcMethodHandler[Any, Any]:
    make = _MAKERS[method.client_streaming, method.server_streaming]
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    answer = with_grpc_call(f"{method.containing_service.name}/{method.name}", getattr(servicer, method.name))
    answer = _of_readable_ones(answer) if method.client_streaming else _if_readable(answer)
    return make(answer, _reader(request_type), response_type.SerializeToString)


def _reader(request_type: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    def read(content: bytes) -> Message | DecodeError:
        try:
            return request_type.FromString(content)
        except DecodeError as error:
            return error

    return read


def _unreadable() -> BlockyardError:
    return invalid([Violation("", "the request cannot be read: is every string UTF-8?")])


def _if_readable(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer_if_readable(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            raise _unreadable()
        return await answer(request, context)

    return answer_if_readable


def _of_readable_ones(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            yield _unreadable() if isinstance(request, DecodeError) else request

    async def answer_readable_ones(requests: AsyncIterator[Any], context: Any) -> Any:
        return await answer(readable(requests), context)

    return answer_readable_ones
