"""The synchronous client of the public API. One client may be used by many threads at once."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from blockyard.client import codec
from blockyard.client.access import ClientAccess, ClientTls
from blockyard.client.cancelling import Canceller
from blockyard.client.pooling_calls import PoolingCalls
from blockyard.client.resumption import Request, Resumption
from blockyard.client.retry import Attempts, Deadline, RetryPolicy, may_pass
from blockyard.client.targets import (
    DEFAULT_TARGET,
    HEALTH_METHOD,
    POLL_SECONDS,
    SERVING,
    Metadata,
    Targets,
    make_never_ready_error,
)
from blockyard.contract.codec.models import MODEL
from blockyard.contract.events import Delta, Event
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.tracing.spans import active_trace_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blockyard.client.chat import ChatOptions, Messages
    from blockyard.client.results import Completion, GenerationOptions
    from blockyard.contract.models import Model


class Connections:
    """A client's channels, one to each of its gateways. They connect when they are first used."""

    def __init__(self, targets: Targets, access: ClientAccess) -> None:
        self.targets = targets
        self._metadata = access.metadata
        self._channels = {target: access.make_channel(target) for target in targets}
        self._stubs = {
            target: inference_pb2_grpc.InferenceServiceStub(channel) for target, channel in self._channels.items()
        }

    def send(self, target: str, method: str, request: Any, seconds: float | None, extra: Metadata = ()) -> Any:
        """Calls a gateway and returns its response or response stream; raises grpc.RpcError. `extra`: more metadata."""
        return getattr(self._stubs[target], method)(request, timeout=seconds, metadata=(*self._metadata, *extra))

    def cancel(self, request_ids: list[str], seconds: float) -> None:
        """Cancels requests at a gateway, if one can be reached; raises nothing."""
        request = inference_pb2.CancelGenerateRequest(request_ids=request_ids)
        for _ in self.targets:
            target = self.targets.current
            try:
                self.send(target, "CancelGenerate", request, seconds)
            except grpc.RpcError:
                self.targets.on_failure(target)
            else:
                return

    def is_ready(self, target: str, seconds: float | None) -> bool:
        """Returns whether a gateway takes requests; raises BlockyardError if it cannot be reached."""
        try:
            return self._channels[target].unary_unary(HEALTH_METHOD, None, None)(b"", timeout=seconds) == SERVING
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Cancels running calls and closes the channels."""
        for channel in self._channels.values():
            channel.close()


class Stream:
    """The events of one request: an `Accepted`, `Delta`s, and a `Finished` for each sequence.
    A `Recovered` reports an internal failure that the request survived, a `Loading` that the model is being loaded.

    If a connection breaks or a gateway fails, the stream resumes where it was after a pause, at another gateway if the
    client has several. `num_resumes` counts the resumptions. Each event comes once.

    Iterate over it, or over `text_deltas()`. Raises BlockyardError if the server ends the request with an error, or if
    no gateway answers for as long as the client's RetryPolicy allows. Leaving it early (`close`, the end of its `with`
    block, or garbage collection) cancels the request; leaving a stream of `Client.resume` cancels nothing.
    """

    def __init__(self, connections: Connections, resumption: Resumption, canceller: Canceller) -> None:
        self._connections = connections
        self._resumption = resumption
        self._canceller = canceller
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The trace of the span that opened the stream; another span may read it.
        self._trace = active_trace_metadata()
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # gRPC ends the call itself. Do not block: garbage collection may run this at any point of any thread.
        if not self._closed.is_set() and self._resumption.needs_cancel:
            self._canceller.cancel(self._resumption.request_id)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                response = next(self._call, None)
                if response is None:
                    self._resumption.on_end()
                    self._closed.set()
                elif (event := self._resumption.on_message(response.event)) is not None:
                    return event
            except grpc.RpcError as error:
                self._go_on(from_rpc_error(error))
            except BlockyardError as error:
                self._go_on(error)
        raise StopIteration

    def _open(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            request = self._resumption.next_request()
            self._target = self._connections.targets.current
            seconds = self._resumption.deadline.remaining()
            self._call = self._connections.send(self._target, method_of(request), request, seconds, self._trace)

    def _go_on(self, error: BlockyardError) -> None:
        """Opens a new call if the request survives the failure; otherwise raises it."""
        if self._closed.is_set():
            return
        try:
            delay_seconds = self._resumption.delay_after(error)
        except BlockyardError:
            self.close()
            raise error from None
        self._call.cancel()
        self._connections.targets.on_failure(self._target)
        self._closed.wait(delay_seconds)
        self._open()

    @property
    def request_id(self) -> str:
        """The request's id, with which `Client.resume` reads the answer from any process."""
        return self._resumption.request_id

    @property
    def num_resumes(self) -> int:
        return self._resumption.num_resumes

    def text_deltas(self, index: int = 0) -> Iterator[str]:
        """Yields the text of the sequence `index`, piece by piece."""
        for event in self:
            if isinstance(event, Delta) and event.index == index and event.text:
                yield event.text

    def result(self) -> Completion:
        """Reads the remaining events and returns the whole answer."""
        for _ in self:
            pass
        return self._resumption.make_completion()

    def close(self) -> None:
        """Cancels the request unless it has ended. Does not wait. May be called from any thread, more than once."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._call.cancel()
        if self._resumption.needs_cancel:
            self._canceller.cancel(self._resumption.request_id)


def method_of(request: Request) -> str:
    """Returns the name of the rpc that takes this request."""
    return request.DESCRIPTOR.name.removesuffix("Request")


class Client(PoolingCalls):
    """A client of one gateway, or of several: if one fails, it calls the next.

    Every method raises BlockyardError, and no other error, if the server refuses or the connection fails. A call that
    fails with UNAVAILABLE is tried again a few times, after the delay that the server asks for; a broken stream is
    resumed for a minute or longer (`RetryPolicy`). `timeout` is in seconds, over all tries; None: no limit.

    Args:
        target: one address or several, as a list or a text with commas between.
        retry: how often and how long to try; None: the default policy.
        tenant: the tenant that requests are counted for, at most 64 of [A-Za-z0-9._-]; a key brings its own.
        api_key: the key, if the server requires one.
        tls: whether to use TLS, or a `ClientTls` with its certificates.

        with blockyard.Client("127.0.0.1:50051") as client:
            print(client.generate("Once upon a time", max_tokens=50).text)
            with client.stream("Once upon a time", temperature=0.7, seed=1) as stream:
                for text in stream.text_deltas():
                    print(text, end="", flush=True)
            print(client.chat([blockyard.Message("user", "Tell me a story.")]).text)
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        retry: RetryPolicy | None = None,
        tenant: str = "",
        api_key: str = "",
        tls: ClientTls | bool = False,
    ) -> None:
        self._targets = Targets(target)
        self._retry = retry or RetryPolicy()
        self._connections = Connections(self._targets, ClientAccess(tenant, api_key, tls))
        self._canceller = Canceller(self._connections.cancel)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    @property
    def target(self) -> str:
        """The gateways' addresses, separated by commas."""
        return str(self._targets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running requests and closes the connections."""
        for stream in tuple(self._streams):
            stream.close()
        self._canceller.stop()
        self._connections.close()

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Generates the whole answer to a prompt: a text, or token ids, which are used unchanged."""
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.result()

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Stream:
        """Generates an answer as a stream of events."""
        return self._open_stream(Resumption(codec.make_spec(prompt, options), self._make_attempts(timeout)))

    def chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]) -> Completion:
        """Generates the whole answer to a conversation: `Message`s, or mappings in OpenAI's form."""
        with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return stream.result()

    def stream_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Generates an answer to a conversation as a stream of events."""
        return self._open_stream(Resumption(codec.make_chat_spec(messages, options), self._make_attempts(timeout)))

    def resume(self, request_id: str, *, timeout: float | None = None) -> Stream:
        """Reads a request that another client started, in this process or another, from its beginning.

        The system keeps a request while it runs and for a minute after; later this raises REQUEST_EXPIRED. If an answer
        is needed in any case, send the same prompt and options with the same `request_id` instead. The deltas have
        token ids if the client that started the request asked for them, as resuming clients do.
        """
        return self._open_stream(Resumption(None, self._make_attempts(timeout), request_id=request_id))

    def _make_attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, timeout, len(self._targets))

    def _open_stream(self, resumption: Resumption) -> Stream:
        if resumption.needs_cancel:
            self._canceller.start()
        stream = Stream(self._connections, resumption, self._canceller)
        self._streams.add(stream)
        return stream

    def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Cancels requests, and returns the ids of those that were running. An unknown id is no error.

        A scheduler that has just started may not know a request yet: it cancels the request if a gateway brings it, and
        the id is returned too.
        """
        request = inference_pb2.CancelGenerateRequest(request_ids=request_ids)
        response = self._call("CancelGenerate", request, timeout)
        return [*response.cancelled_request_ids, *response.pending_request_ids]

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[int]:
        """Turns text into the token ids that a prompt of this text would have."""
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list(self._call("Tokenize", request, timeout).token_ids)

    def tokenize_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Turns a conversation into the token ids of its prompt, for example to count them."""
        spec = codec.make_chat_spec(messages, options)
        request = inference_pb2.TokenizeRequest(model=spec.model, conversation=spec.conversation)
        return list(self._call("Tokenize", request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return self._call("Detokenize", request, timeout).text

    def list_models(self, *, timeout: float | None = None) -> list[Model]:
        response = self._call("ListModels", inference_pb2.ListModelsRequest(), timeout)
        return [MODEL.decode(model) for model in response.models]

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until a gateway takes requests. Raises BlockyardError (NO_READY_WORKER) after `timeout` seconds."""
        deadline = Deadline(timeout)
        cause: BlockyardError | None = None
        while True:
            for target in self._targets:
                try:
                    if self._connections.is_ready(target, deadline.remaining(1.0)):
                        self._targets.prefer(target)
                        return
                    cause = None
                except BlockyardError as error:
                    cause = error
            if not deadline.allows(POLL_SECONDS):
                raise make_never_ready_error(self._targets, cause)
            time.sleep(POLL_SECONDS)

    def _call(self, method: str, request: Any, timeout: float | None) -> Any:
        attempts = self._make_attempts(timeout)
        while True:
            target = self._targets.current
            try:
                return self._connections.send(target, method, request, attempts.deadline.remaining())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            if not may_pass(error):
                raise error
            self._targets.on_failure(target)
            time.sleep(attempts.delay_after(error))
