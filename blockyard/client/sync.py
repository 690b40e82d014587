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
        """Calls a gateway: returns its answer, or a stream of them; raises grpc.RpcError. `extra`: metadata."""
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
        """Whether a gateway takes requests; raises BlockyardError where it cannot be reached."""
        try:
            return self._channels[target].unary_unary(HEALTH_METHOD, None, None)(b"", timeout=seconds) == SERVING
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Closes the channels; calls that run are cancelled."""
        for channel in self._channels.values():
            channel.close()


class Stream:
    """The events of one request, as they come: an `Accepted`, `Delta`s, and a `Finished` for each sequence.
    A `Recovered` among them reports a failure inside the system that the request has outlived.

    A connection that breaks, and a gateway that is gone, cost a pause: the stream reads on where it was, at another
    gateway if the client has several. `num_resumes` counts it. Each event comes once.

    Iterate over it, or over `text_deltas()`. Raises BlockyardError where the server ends the request with an error, or
    where no gateway answered for as long as the client's RetryPolicy says. Leaving it early (`close`, the end of its
    `with` block, forgetting it) cancels the request; a stream of `Client.resume` is only left.
    """

    def __init__(self, connections: Connections, resumption: Resumption, canceller: Canceller) -> None:
        self._connections = connections
        self._resumption = resumption
        self._canceller = canceller
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # The span in which the stream began, wherever it is read.
        self._trace = active_trace_metadata()
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The call ends by itself, and nothing here may wait: this may run in the midst of anything.
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
        """Opens the call anew after a failure that the answer outlives; else raises it."""
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
        """The request's name, under which `Client.resume` reads it from anywhere."""
        return self._resumption.request_id

    @property
    def num_resumes(self) -> int:
        return self._resumption.num_resumes

    def text_deltas(self, index: int = 0) -> Iterator[str]:
        """Yields the text of one of the sequences, piece by piece."""
        for event in self:
            if isinstance(event, Delta) and event.index == index and event.text:
                yield event.text

    def result(self) -> Completion:
        """Reads what is left, and returns the whole answer."""
        for _ in self:
            pass
        return self._resumption.make_completion()

    def close(self) -> None:
        """Cancels the request, unless it has ended. Does not wait. May be called from any thread, and again."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._call.cancel()
        if self._resumption.needs_cancel:
            self._canceller.cancel(self._resumption.request_id)


def method_of(request: Request) -> str:
    """Names the rpc that a stream's request belongs to."""
    return request.DESCRIPTOR.name.removesuffix("Request")


class Client(PoolingCalls):
    """Talks to a gateway, or to one of several: to the next one when one fails.

    Every method raises BlockyardError, and none other, when the server refuses or the connection fails. A call that
    fails with UNAVAILABLE is tried again a few times, after the delay that the server asks for; an answer that has
    begun is read on after a break, for a minute and more (`RetryPolicy`). `timeout` is in seconds, over all tries;
    None: no limit.

    Args:
        target: one address or several: a list, or one text with commas between.
        retry: how often to try.
        tenant: on whose behalf requests are sent, at most 64 of [A-Za-z0-9._-]; not needed with a key, which has one.
        api_key: where the server asks for one.
        tls: speak TLS; a `ClientTls` says with which certificates.

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
        """Its addresses, with commas between."""
        return str(self._targets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; what is running is cancelled."""
        for stream in tuple(self._streams):
            stream.close()
        self._canceller.stop()
        self._connections.close()

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Generates the whole answer to a prompt: text, or token ids to which nothing is added."""
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
        """Reads a request from its beginning that another client has started, of this process or another.

        It is known as long as it runs and a minute after; then this is REQUEST_EXPIRED. A request that has to be
        answered in any case is sent again instead: the same prompt and options with its `request_id`. The deltas have
        the token ids if whoever started it was sent them, as a client is that resumes.
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

        With them are those of which a scheduler that has just begun does not know yet: it ends them if they come.
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
        """Turns a conversation into the token ids of its prompt, to count them for one."""
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
        """Returns when a gateway takes requests. Raises BlockyardError (NO_READY_WORKER) when time runs out."""
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
