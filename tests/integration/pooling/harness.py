"""Gateway, scheduler and a worker without a model, in one process: numbers are hashes of what they depend on."""

from __future__ import annotations

import json
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import httpx
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from blockyard.configuration import ModelSettings
from blockyard.contract.models import Task
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.model_files import model_digest
from gateway.config import GatewayConfiguration
from gateway.server import Server as Gateway
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.server import Server as Scheduler
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WORDS = [f"w{number}" for number in range(90)]
LABELS = {"0": "sad", "1": "glad", "2": "neither"}
_SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "no", "yes", "find:"]


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of 96 words, which has a template for pairs."""
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    backend.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, task: Task) -> Path:
    """Writes what a gateway reads of a model for a task."""
    folder.mkdir()
    write_tokenizer(folder)
    architecture = {Task.CLASSIFY: "LlamaForSequenceClassification", Task.SCORE: "Qwen3ForCausalLM"}
    config: dict[str, Any] = {"architectures": [architecture.get(task, "LlamaForCausalLM")], "hidden_size": 8}
    if task is Task.CLASSIFY:
        config["id2label"] = LABELS
    (folder / "config.json").write_text(json.dumps(config))
    if task is Task.EMBED:
        kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        prompts = {"prompts": {"query": "find: ", "document": ""}}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


class Services:
    """The services of one test. `worker` and `scheduler` may be lost, and come back at their addresses."""

    def __init__(self, model: Path, sockets: str, task: Task, stack: AsyncExitStack, **options: Any) -> None:
        self.model = model
        self._sockets = sockets
        self._stack = stack
        self._options = FakeWorkerOptions(task=task, model_digest=model_digest(model), **options)
        self.worker: FakeWorker
        self.scheduler: Scheduler
        self.gateway: Gateway
        self.http: httpx.AsyncClient
        self.stub: inference_pb2_grpc.InferenceServiceAsyncStub

    async def start(self, **settings: Any) -> None:
        """Starts all of them. `settings`: of the scheduler's steps."""
        await self.start_worker()
        base = SchedulerConfiguration()
        self.configuration = replace(
            base,
            model=replace(base.model, model="fake"),
            scheduler=replace(base.scheduler, **settings),
            service=replace(
                base.service,
                scheduler_address=f"unix:{self._sockets}/scheduler",
                worker_address=f"unix:{self._sockets}/worker",
                debug_integrity=True,
                reattach_seconds=0.0,
            ),
        )
        await self.start_scheduler()
        self.gateway = await self.start_gateway()
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.gateway.http_port}", timeout=60, verify=False)
        )
        self.stub = await self.connect(self.gateway)

    async def start_gateway(self) -> Gateway:
        """Starts a gateway, and waits until it is ready."""
        base = GatewayConfiguration()
        public = replace(base.public, grpc_port=0, http_port=0, admin_port=0, enable_page=False)
        service = replace(base.service, scheduler_address=self.configuration.service.scheduler_address)
        model = ModelSettings(model=str(self.model))
        gateway = Gateway(replace(base, model=model, public=public, service=service))
        await gateway.start()
        self._stack.push_async_callback(gateway.stop)
        await gateway.generation.model_of("").link.wait_until(gateway.generation.is_ready)
        return gateway

    async def connect(self, gateway: Gateway) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        """Connects to a gateway."""
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}"))
        return inference_pb2_grpc.InferenceServiceStub(channel)

    async def start_worker(self) -> None:
        """Starts a worker, in the place of one that is gone."""
        self.worker = await self._stack.enter_async_context(FakeWorker(self._options, f"unix:{self._sockets}/worker"))

    async def start_scheduler(self) -> None:
        """Starts a scheduler, in the place of one that is gone."""
        self.scheduler = Scheduler(self.configuration)
        await self.scheduler.start()
        self._stack.push_async_callback(self.scheduler.stop)

    async def embed(self, inputs: list[str], **fields: Any) -> list[bytes]:
        """The vectors of texts, over gRPC."""
        messages = [inference_pb2.PoolingInput(text=text) for text in inputs]
        answer = await self.stub.Embed(inference_pb2.EmbedRequest(inputs=messages, **fields))
        return [struct.pack(f"<{len(each.values)}f", *each.values) for each in answer.embeddings]


@asynccontextmanager
async def services(
    folder: Path, sockets: str, task: Task, *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Services]:
    """Runs the services for a task. `options`: of the worker."""
    async with AsyncExitStack() as stack:
        running = Services(write_model(folder / "model", task), sockets, task, stack, **options)
        await running.start(**(settings or {}))
        yield running
        # A refused step is outlived, so nothing else would show it.
        assert running.worker.refusals == []
