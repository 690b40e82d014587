"""The synchronous client of the public API. One client may be used by many threads at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard import client_codec as codec
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.results import Completion, CompletionBuilder, Delta, Event, GenerationOptions, Model
from blockyard.retry import Attempts, Deadline, RetryPolicy
from blockyard.rpc import PUBLIC_MESSAGE_BYTES, Options, channel_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_TARGET = "127.0.0.1:50051"
POLL_SECONDS = 0.1
Response = TypeVar("Response")
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")


def client_channel_options(target: str) -> Options:
    """Options of a client's channel: a server on the same machine is never behind a proxy."""
    return channel_options(PUBLIC_MESSAGE_BYTES, use_proxy=not target.startswith(_LOOPBACK))


def never_ready(target: str, cause: BlockyardError | None) -> BlockyardError:
    """The error of having waited in vain."""
    told = cause.message if cause else "it answers, and has no worker that takes requests"
    return BlockyardError(
        Reason.NO_READY_WORKER, f"{target} is not ready: {told}", metadata=cause.metadata if cause else {}
    )


class Stream:
    """The events of one request, as they come: an `Accepted`, `Delta`s, and a `Finished` for each sequence.
    A `Recovered` among them tells of a failure that was outlived.

    Iterate over it, or over `text_deltas()`. Raises BlockyardError where the server ends the request with an error, or
    where events were lost. Leaving it early (`close`, the end of its `with` block) cancels the request.
    """

    def __init__(self, open_call: Callable[[float | None], Any], num_sequences: int, attempts: Attempts) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._reader = codec.EventReader(num_sequences)
        self._builder = CompletionBuilder()
        self._closed = threading.Event()
        self._started = False
        self._call = open_call(attempts.deadline.remaining())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        response = self._receive()
        if response is None:
            raise StopIteration
        event = self._reader.read(response)
        self._builder.add(event)
        return event

    def _receive(self) -> inference_pb2.StreamGenerateResponse | None:
        while not self._closed.is_set():
            try:
                response = next(self._call, None)
            except grpc.RpcError as rpc_error:
                self._try_again(from_rpc_error(rpc_error))
                continue
            self._started = True
            if response is None:
                self._reader.end()
            return response
        return None

    def _try_again(self, error: BlockyardError) -> None:
        """Opens the call anew if nothing has come yet and the failure may pass; else raises it."""
        if self._closed.is_set():
            return
        if self._started:
            raise error from None
        if not self._closed.wait(self._attempts.delay_after(error)):
            self._call = self._open_call(self._attempts.deadline.remaining())

    def text_deltas(self, index: int = 0) -> Iterator[str]:
        """Yields the text of one of the sequences, piece by piece."""
        for event in self:
            if isinstance(event, Delta) and event.index == index and event.text:
                yield event.text

    def result(self) -> Completion:
        """Reads what is left, and returns the whole answer."""
        for _ in self:
            pass
        return self._builder.build()

    def close(self) -> None:
        """Cancels the request, unless it has ended. May be called from any thread, and again."""
        self._closed.set()
        self._call.cancel()


class Client:
    """Talks to a gateway.

    Every method raises BlockyardError, and none other, when the server refuses or the connection fails. A call that
    fails with UNAVAILABLE before anything came back is tried again a few times, after the delay that the server asks
    for. `timeout` is in seconds, over all tries; None: no limit.

        with blockyard.Client("127.0.0.1:50051") as client:
            print(client.generate("Once upon a time", max_tokens=50).text)
            with client.stream("Once upon a time", temperature=0.7, seed=1) as stream:
                for text in stream.text_deltas():
                    print(text, end="", flush=True)
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, retry: RetryPolicy | None = None) -> None:
        self.target = target
        self._retry = retry or RetryPolicy()
        self._channel = grpc.insecure_channel(target, client_channel_options(target))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; what is running is cancelled."""
        self._channel.close()

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Generates the whole answer to a prompt: text, or token ids to which nothing is added."""
        request = inference_pb2.GenerateRequest(spec=codec.make_spec(prompt, options))
        return codec.to_completion(self._call(self._stub.Generate, request, timeout))

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Stream:
        """Generates an answer as a stream of events."""
        request = inference_pb2.StreamGenerateRequest(spec=codec.make_spec(prompt, options))

        def open_call(seconds: float | None) -> Any:
            return self._stub.StreamGenerate(request, timeout=seconds)

        return Stream(open_call, options.get("n") or 1, Attempts(self._retry, timeout))

    def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Cancels requests, and returns the ids of those that were running. An unknown id is no error."""
        request = inference_pb2.CancelGenerateRequest(request_ids=request_ids)
        return list(self._call(self._stub.CancelGenerate, request, timeout).cancelled_request_ids)

    def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[int]:
        """Turns text into the token ids that a prompt of this text would have."""
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Turns token ids into text."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return self._call(self._stub.Detokenize, request, timeout).text

    def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """Lists the models that are served."""
        return codec.to_models(self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout))

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Returns when the gateway takes requests. Raises BlockyardError (NO_READY_WORKER) when time runs out."""
        deadline = Deadline(timeout)
        cause: BlockyardError | None = None
        while True:
            try:
                response = self._health.Check(health_pb2.HealthCheckRequest(), timeout=deadline.remaining(1.0))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                cause = None
            except grpc.RpcError as error:
                cause = from_rpc_error(error)
            if not deadline.allows(POLL_SECONDS):
                raise never_ready(self.target, cause)
            time.sleep(POLL_SECONDS)

    def _call(self, method: Callable[..., Response], request: Any, timeout: float | None) -> Response:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return method(request, timeout=attempts.deadline.remaining())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            time.sleep(attempts.delay_after(error))
