"""`LLM`: runs the three services behind one object, for a script or a notebook."""

from __future__ import annotations

import asyncio
import json
import sys
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from rich.console import Console
from rich.progress import Progress

from blockyard.client.asynchronous import AsyncClient
from blockyard.client.sync import Client, Stream
from blockyard.configuration import CHOSEN_TOGETHER, SystemConfiguration
from blockyard.contract.chat import Message
from blockyard.contract.diagnostics import DIAGNOSTICS, find_operation
from blockyard.extras import require_services
from blockyard.local.local_system import LocalSystem
from blockyard.local.operator import WRITE_AN_EXTENSION
from blockyard.local.running_system import PATIENT, PRIVATE, START_SECONDS, RunningSystem
from blockyard.settings import resolve, settings_of, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from blockyard.client.chat import ChatOptions, Messages
    from blockyard.client.pooling import ClassifyOptions, EmbedOptions, ScoreOptions
    from blockyard.client.results import Completion, GenerationOptions
    from blockyard.contract.models import Model
    from blockyard.contract.pooling import Classification
    from blockyard.lora.request import LoRARequest

    Ask = Callable[[AsyncClient, Any], Coroutine[Any, Any, Completion]]

Prompt = str | list[int] | tuple[int, ...]
# More concurrent requests would only wait in the gateway instead of here.
MAX_CONCURRENT_REQUESTS = 512
# Inputs of one pooling call.
MAX_INPUTS = 2048


class LLM:
    """A model, served by a gateway, a scheduler and workers that this object starts and stops.

    The services listen on free ports of the loopback interface and on private sockets. They end with this object, or at
    the latest with this process.

    Args:
        model: a folder or hub id; empty: the demo model.
        start_timeout_seconds: how long the services may take until all replicas are ready.
        settings: the options of `blockyard serve`, with underscores: `device="cpu", data_parallel_size=2`. By default
            ports are free ones, and only errors are logged.

    Raises TypeError for an unknown setting, SettingsError for a bad value, BlockyardError for a model that cannot be
    served (with every reason that config.json gives), and StartError if a service does not start or a replica is not
    ready in time.

        with blockyard.LLM("Qwen/Qwen3-0.6B") as llm:
            for completion in llm.generate(["Once upon a time", "2 + 2 ="], max_tokens=30, temperature=0):
                print(completion.text)
    """

    def __init__(self, model: str = "", *, start_timeout_seconds: float = START_SECONDS, **settings: Any) -> None:
        require_services("blockyard.LLM")
        _check_names(settings)
        configuration = resolve(SystemConfiguration, {**PRIVATE, **settings, **({"model": model} if model else {})})
        self._system = RunningSystem(LocalSystem(configuration))
        # Stops the services when this object is garbage-collected, or at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._system.stop)
        self._system.start(start_timeout_seconds)
        self._client = Client(self._system.local.endpoints.local, retry=PATIENT)

    @property
    def target(self) -> str:
        """The address of the gRPC API, for clients of your own."""
        return self._system.local.endpoints.grpc

    @property
    def http_url(self) -> str:
        """The URL of the OpenAI API."""
        return f"http://{self._system.local.endpoints.http}/v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the services. May be called more than once."""
        if self._finalizer.alive:
            self._client.close()
        self._finalizer()

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        progress: bool = False,
        lora_request: LoRARequest | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Completion]:
        """Generates answers to all prompts concurrently; returns them in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids.
            progress: show a progress bar if standard error is a terminal.
            lora_request: an adapter for all prompts; see `load_lora`. A loaded adapter may be named by `model` instead.
            options: of every request. With a seed equal prompts have equal answers. A request_id needs a single prompt.

        If a worker, the scheduler or the gateway dies, answers go on when it is back. Otherwise the first error is
        raised as BlockyardError, and the other requests are cancelled.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list: use generate([prompt])")
        if lora_request:
            options["model"] = self.load_lora(lora_request)
        return self._answer_all(prompts, lambda client, prompt: client.generate(prompt, **options), options, progress)

    def chat(
        self,
        conversations: Sequence[Messages],
        *,
        progress: bool = False,
        lora_request: LoRARequest | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]:
        """Answers conversations concurrently, in their order. See `generate`, and `Client.chat` for messages."""
        if conversations and isinstance(conversations[0], Message | Mapping):
            raise TypeError("conversations must be a list of conversations: use chat([messages])")
        if lora_request:
            options["model"] = self.load_lora(lora_request)
        return self._answer_all(conversations, lambda client, said: client.chat(said, **options), options, progress)

    def _answer_all(
        self, prompts: Sequence[Any], ask: Ask, options: GenerationOptions, progress: bool
    ) -> list[Completion]:
        if options.get("request_id") and len(prompts) > 1:
            raise TypeError("a request_id goes with one prompt only")
        shown = progress and sys.stderr.isatty()
        bar = Progress(console=Console(stderr=True), transient=True) if shown else nullcontext()
        with bar:
            task = bar.add_task("generating", total=len(prompts)) if isinstance(bar, Progress) else None

            def advance() -> None:
                if isinstance(bar, Progress) and task is not None:
                    bar.advance(task)

            return self._system.run(_answer_all(self._system.local.endpoints.local, prompts, ask, advance))

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Stream:
        """Generates an answer as a stream of events; see `blockyard.Stream`."""
        return self._client.stream(prompt, **options)

    def embed(self, inputs: Sequence[Prompt], **options: Unpack[EmbedOptions]) -> list[list[float]]:
        """Computes a vector for each input: a text, or a list of token ids. Any number of inputs.

        A vector's bits depend only on its input and the model. Raises BlockyardError FEATURE_DISABLED if the model is
        not served to embed (the setting `task`).
        """
        return [list(vector) for some in _split(inputs) for vector in self._client.embed(some, **options).vectors]

    def score(self, query: Prompt, documents: Sequence[Prompt], **options: Unpack[ScoreOptions]) -> list[float]:
        """Scores how well each document answers the query: a reranker's score, or the cosine of vectors."""
        if "top_n" in options:
            raise TypeError("score has no top_n: it returns the scores of all documents in their order, to be sorted")
        pieces = [self._client.score(query, some, **options) for some in _split(documents)]
        return [document.score for piece in pieces for document in piece.documents]

    def classify(self, inputs: Sequence[Prompt], **options: Unpack[ClassifyOptions]) -> list[Classification]:
        """Computes the probability of each of the model's labels for each input."""
        return [each for some in _split(inputs) for each in self._client.classify(some, **options).classifications]

    def load_lora(self, lora_request: LoRARequest) -> str:
        """Loads an adapter at all replicas unless it is loaded; returns the `model` name for requests.

        Needs the settings `max_loras` and `lora_root`. Raises BlockyardError if the adapter cannot be loaded.
        """
        return self._system.run(self._system.local.load_lora(lora_request))

    def tokenize(self, text: str) -> list[int]:
        """Turns text into the token ids that a prompt of this text would have."""
        return self._client.tokenize(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(token_ids)

    # Operators' calls.

    def sleep(self, level: int = 1) -> None:
        """Frees the workers' memory until `wake_up`. Level 1 keeps the weights in host memory, 2 keeps nothing.

        Running requests go on afterwards with the same tokens as without the sleep. GPU memory can be freed only if
        `enable_sleep` was set. Raises BlockyardError.
        """
        self._system.run(self._system.local.make_operator().sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates freed memory again: that of `tags` ("weights", "kv_cache"), or all if None.

        Weights that were dropped are loaded again. Raises BlockyardError (FIELD_INVALID for a tag that is awake), and
        TypeError for an unknown tag.
        """
        self._system.run(self._system.local.make_operator().wake_up(tags or ()))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[bytes] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Runs an operation on every worker between its steps; returns the answers by replica, then by rank.

        Args:
            method: `extension.operation` of an extension in the setting `worker_extension`, or the name of a built-in
                operation: see `blockyard.contract.diagnostics.OPERATIONS`.
            timeout: seconds that the operation may take, at most 120. [30]
            args: for an extension's operation: a single payload, bytes.
            kwargs: for a built-in operation: its fields, such as `{"names": ["lm_head.weight"]}` for weight_norms.

        Returns:
            Bytes for an extension's operation, dictionaries for a built-in one.

        Raises:
            TypeError: `method` is a function or an unknown name, or arguments have the wrong type.
            BlockyardError: OPERATION_DEADLINE with the ranks that did not answer in time, EXTENSION_FAILED, and
                FIELD_INVALID for an unknown extension or operation.
        """
        return self._system.run(self._collective_rpc(method, timeout, args, kwargs or {}))

    async def _collective_rpc(
        self, method: object, seconds: float | None, args: Sequence[object], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        if not isinstance(method, str):
            raise TypeError(WRITE_AN_EXTENSION)
        operator, (extension, operation) = self._system.local.make_operator(), find_operation(method)
        if extension == DIAGNOSTICS:
            if args:
                raise TypeError(f"{method} takes its arguments by name: use kwargs")
            answers = await operator.call(extension, operation, json.dumps(kwargs).encode(), seconds)
            return [json.loads(answer) for answer in answers]
        payload = args[0] if args else b""
        if kwargs or len(args) > 1 or not isinstance(payload, bytes):
            raise TypeError("an extension's operation takes one payload, bytes: use args=(payload,)")
        return await operator.call(extension, operation, payload, seconds)

    def apply_model(self, func: str, payload: bytes = b"") -> list[bytes]:
        """Runs an extension's operation, `extension.operation`, on every worker; it can access the model.

        The same as `collective_rpc` with one payload, under vLLM's name.
        """
        if not isinstance(cast("object", func), str) or "." not in func:
            raise TypeError(WRITE_AN_EXTENSION)
        return self.collective_rpc(func, args=(payload,))

    def start_profile(self) -> None:
        """Starts to profile the workers' steps; raises BlockyardError WRONG_STATE if a profile is running."""
        self._system.run(self._system.local.make_operator().start_profile())

    def stop_profile(self, folder: str | Path = ".") -> list[Path]:
        """Ends the profile and writes a file for each worker, which Perfetto (ui.perfetto.dev) opens.

        Raises BlockyardError WRONG_STATE if no profile is running, and OSError if the folder cannot be written.
        """
        return self._system.run(self._system.local.make_operator().stop_profile(Path(folder)))

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix caches; returns False if blocks of running requests were kept."""
        return self._system.run(self._system.local.make_operator().reset_prefix_cache())

    @property
    def model(self) -> Model:
        return self._client.list_models()[0]


def _split(inputs: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    """Splits inputs into parts of at most MAX_INPUTS, one for each call."""
    if isinstance(inputs, str):
        raise TypeError("inputs must be a list: use [text]")
    return [inputs[start : start + MAX_INPUTS] for start in range(0, len(inputs), MAX_INPUTS)]


def _check_names(settings: Iterable[str]) -> None:
    known = [setting.name for setting in settings_of(SystemConfiguration)]
    unknown = sorted(set(settings) - set(known))
    problems = [f"{name} ({CHOSEN_TOGETHER[name]})" for name in unknown if name in CHOSEN_TOGETHER]
    problems += [f"{name}{suggestion(name, known)}" for name in unknown if name not in CHOSEN_TOGETHER]
    if problems:
        raise TypeError(f"unknown settings: {', '.join(problems)}")


async def _answer_all(target: str, prompts: Sequence[Any], ask: Ask, advance: Callable[[], None]) -> list[Completion]:
    room = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def one(client: AsyncClient, prompt: Any) -> Completion:
        async with room:
            completion = await ask(client, prompt)
        advance()
        return completion

    async with AsyncClient(target, retry=PATIENT) as client:
        tasks = [asyncio.create_task(one(client, prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
