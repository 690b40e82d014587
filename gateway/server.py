"""Starts and stops the gateway's process: tokenizer, link to the scheduler, fronts, and health checks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.addresses import join_address
from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.clock import SYSTEM, Clock
from blockyard.errors import BlockyardError, Reason
from blockyard.model_files import resolve_model, served_name
from blockyard.security.exposure import check_admin
from blockyard.security.identity import InternalIdentity
from blockyard.security.keys import KeyFileError
from blockyard.service.interceptors import CallCounter
from blockyard.service.process import Monitoring, raise_file_limit, run_process, tune_collector
from blockyard.service.servers import bind, make_server
from blockyard.service.signals import on_stop_signal
from blockyard.settings import SettingsError, load_each
from blockyard.telemetry import EventLogger
from blockyard.transport import GRPC, Transport
from gateway.access import make_access
from gateway.config import OF_MODEL, GatewayConfiguration, split_models
from gateway.fronts.admin_http.app import make_admin_app
from gateway.fronts.grpc_api.admin_servicer import SERVICE_NAME as ADMIN_SERVICE_NAME
from gateway.fronts.grpc_api.admin_servicer import AdminServicer
from gateway.fronts.grpc_api.servicer import SERVICE, InferenceServicer, add_inference_service
from gateway.fronts.http.metrics import add_metrics
from gateway.fronts.http.server import HttpFront, make_http_app
from gateway.fronts.open_inference.servicer import SERVICE as OPEN_INFERENCE
from gateway.fronts.open_inference.servicer import OpenInferenceServicer, add_open_inference_service
from gateway.fronts.page.routes import StatusBoard, add_page
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.live.scheduler_link import SchedulerLink
from gateway.observe.gen_ai_metrics import GenAiMetrics, is_opted_in
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.scheduler_readings import SchedulerReadings
from gateway.observe.vllm_metrics import add_vllm_names
from gateway.pooling.model import read_model_rule
from gateway.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc.aio
    from fastapi import FastAPI

    from blockyard.security.authentication import Gate
    from gateway.text.tokenizer import Tokenizer

log = EventLogger(__name__)

# The time for streams to end before they are closed.
_GRACE_SECONDS = 2.0
_STOPPED = "the gateway stopped before the answer ended, which goes on: resume it at another gateway"


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of a gateway that use the system's threads, processes, files or sockets.

    Attributes:
        make_app: makes the application of HTTP.
        make_front: makes the servers of HTTP.
        load_tokenizer: reads a model's tokenizer.
    """

    make_app: Callable[[GenerationService], FastAPI] = make_http_app
    make_front: Callable[..., HttpFront] = HttpFront
    load_tokenizer: Callable[..., Tokenizer] = load_tokenizer


PARTS = Parts()


class Server:
    """The gateway's process.

    Args:
        configuration: the settings, and the first model's.
        others: the settings of further models; their other settings are not read.
        clock: gives the time, and draws ids and delays.
        transport: makes the gRPC servers, and opens the channels to schedulers.
        parts: makes its parts.

    Attributes:
        generation: the core that all fronts use.
        metrics: the metrics that Prometheus scrapes.
        grpc_port, http_port, admin_port: the ports on which the gateway listens; 0 before `start`.
        monitoring: the servers for health and metrics on other ports.
    """

    def __init__(
        self,
        configuration: GatewayConfiguration,
        *others: GatewayConfiguration,
        clock: Clock = SYSTEM,
        transport: Transport = GRPC,
        parts: Parts = PARTS,
    ) -> None:
        """Reads all files; raises BlockyardError MODEL_NOT_LOADED, CertificateError, KeyFileError or SettingsError."""
        models = [configuration, *others]
        _check_models(models)
        self._public = configuration.public
        self._service = configuration.service
        self.grpc_port = self.http_port = self.admin_port = 0
        check_admin(configuration.public, configuration.security)
        self._access = make_access(configuration.security, clock)
        self._transport = transport
        self._load_tokenizer = parts.load_tokenizer
        identity = InternalIdentity(configuration.internal)
        gateway_id = clock.token_hex(8)
        self.metrics = GatewayMetrics(clock.monotonic)
        self.generation = GenerationService(max_requests=configuration.service.max_requests, clock=clock)
        for each in models:
            self._add_model(each, gateway_id, identity)
        # Do not capture `self`: a server that cannot start would be kept alive until the interpreter ends.
        generation = self.generation
        self.metrics.watch(
            num_requests=lambda: generation.num_requests,
            num_readers=lambda: generation.num_readers,
            is_attached=lambda: all(model.link.takes_requests for model in generation.served_models),
            is_ready=generation.is_ready,
            models=generation.models,
            num_waiting=lambda: {(model.name,): model.num_waiting_here for model in generation.served_models},
        )
        links = {model.name: model.link for model in generation.served_models}
        self._readings = SchedulerReadings(links, clock.monotonic)
        self.metrics.watch_schedulers(self._readings)
        if configuration.service.vllm_metric_names:
            add_vllm_names(self.metrics, self._readings, model_name(configuration))
        if is_opted_in(os.environ):
            names = [model.name for model in generation.served_models]
            self.metrics.gen_ai = GenAiMetrics(self.metrics.registry, names)
        certificates = {"public": self._access.files, "internal": identity.files}
        self.monitoring = Monitoring(self.metrics.registry, certificates, self.generation.is_ready, clock=clock)
        administration = AdminServicer(
            self.generation, gateway_id=gateway_id, shows_prompt_text=configuration.service.show_prompt_text
        )
        self._servers = self._make_servers(administration)
        app = parts.make_app(generation)
        if configuration.public.enable_page:
            add_page(app, StatusBoard(administration.status, clock.monotonic))
        add_metrics(app, self.metrics)
        make, admin_access = parts.make_front, replace(self._access, api=self._access.admin)
        self._admin_http = make(make_admin_app(administration), admin_access)
        self._http = make(app, self._access, self.metrics, allowed_origins=configuration.public.allowed_origins)

    def _add_model(self, configuration: GatewayConfiguration, gateway_id: str, identity: InternalIdentity) -> None:
        """Adds a model with its tokenizer and a link to its scheduler; raises BlockyardError MODEL_NOT_LOADED."""
        text, service = configuration.text, configuration.service
        folder = resolve_model(configuration.model.model, configuration.model.revision, "tokenizer")
        template = Path(text.chat_template) if text.chat_template else None
        tokenizer = self._load_tokenizer(folder, chat_template_file=template, dialect=text.dialect)
        link = SchedulerLink(
            service.scheduler_address,
            gateway_id=gateway_id,
            model_digest=tokenizer.model_digest,
            peer=identity.peer("scheduler"),
            model_name=model_name(configuration),
            starts_on_demand=service.starts_on_demand,
            clock=self.generation.clock,
            transport=self._transport,
        )
        live = LiveRequests(
            link,
            metrics=self.metrics,
            resume_window_seconds=configuration.resume.resume_window_seconds,
            max_scheduler_wait_seconds=service.max_scheduler_wait_seconds,
            num_past_prompts=service.prompt_history,
        )
        self.generation.add_model(
            model_name(configuration),
            tokenizer,
            link,
            live,
            seed=text.seed,
            clamps_max_tokens=text.clamp_max_tokens,
            lora_root=Path(service.gateway_lora_root) if service.gateway_lora_root else None,
            read_rule=lambda task: read_model_rule(folder, task),
            starts_on_demand=service.starts_on_demand,
            max_wait_seconds=service.max_scheduler_wait_seconds,
            shares_prefixes=configuration.security.share_prefixes,
        )

    def _make_servers(self, administration: AdminServicer) -> tuple[grpc.aio.Server, grpc.aio.Server, grpc.aio.Server]:
        """Makes three gRPC servers: for the public APIs, for the admin API, and for all APIs on this machine alone."""
        public_names, admin_names = [SERVICE.full_name, OPEN_INFERENCE.full_name], [ADMIN_SERVICE_NAME]
        public = self._make_server(public_names, self._access.api)
        admin = self._make_server(admin_names, self._access.admin)
        local = self._make_server([*public_names, *admin_names], None)
        for server in (public, local):
            add_inference_service(server, InferenceServicer(self.generation))
            add_open_inference_service(server, OpenInferenceServicer(self.generation))
        for server in (admin, local):
            administration.add_to(server)
        return public, admin, local

    def _make_server(self, service_names: list[str], gate: Gate | None) -> grpc.aio.Server:
        server = make_server(
            PUBLIC_MESSAGE_BYTES,
            service_names,
            gate=gate,
            interceptors=[CallCounter(self.metrics.registry.grpc_calls, self.metrics.on_grpc_error)],
            max_connections=self._access.max_connections,
            transport=self._transport,
        )
        self.monitoring.add_health(server)
        return server

    async def start(self) -> None:
        """Binds the ports, starts to serve, and begins to attach to the scheduler; raises PortTaken."""
        public, admin, local = self._servers
        host, admin_host = self._public.host, self._public.admin_host
        self.grpc_port = bind(public, join_address(host, self._public.grpc_port), self._access.credentials())
        self.admin_port = bind(admin, join_address(admin_host, self._public.admin_port), self._access.credentials())
        if self._service.gateway_local_address:
            bind(local, self._service.gateway_local_address)
        self.http_port = self._http.bind(host, self._public.http_port)
        if self._public.admin_http_port >= 0:
            port = self._admin_http.bind(admin_host, self._public.admin_http_port)
            self._admin_http.start()
            log.info("listening for operators over HTTP", admin_http=join_address(admin_host, port))
        self.monitoring.start(host, self._service.gateway_health_port, self._service.gateway_metrics_port)
        for model in self.generation.served_models:
            model.link.start(model.live.on_progress, model.live.on_scheduler_lost)
        self._readings.start()
        for server in self._servers:
            await server.start()
        self._http.start()
        self._access.warn_if_exposed(host)
        log.info(
            "listening",
            model=",".join(model.name for model in self.generation.served_models),
            dialect=",".join(
                dialect.name if (dialect := model.tokenizer.dialect) else "none"
                for model in self.generation.served_models
            ),
            grpc=join_address(host, self.grpc_port),
            http=join_address(host, self.http_port),
            admin=join_address(admin_host, self.admin_port),
            metrics=join_address(host, self.monitoring.metrics_port) if self.monitoring.metrics_port else None,
            scheduler=",".join(model.link.address for model in self.generation.served_models),
        )

    async def drain(self) -> None:
        """Reports not ready, and serves until no answer is being read, but at most for `drain_seconds`."""
        self.generation.start_draining()
        log.info("draining", num_requests=self.generation.num_requests)
        try:
            async with asyncio.timeout(self._service.drain_seconds):
                await self.generation.wait_until_idle()
        except TimeoutError:
            log.warning("closing streams", num_requests=self.generation.num_requests)

    async def stop(self) -> None:
        """Ends running requests with DRAINING, and closes everything. The scheduler keeps requests for resuming."""
        self.generation.start_draining()
        self.generation.stop(BlockyardError(Reason.DRAINING, _STOPPED, retry_after_seconds=1.0))
        self._readings.stop()
        await asyncio.gather(
            self._http.stop(), self._admin_http.stop(), *(server.stop(_GRACE_SECONDS) for server in self._servers)
        )
        await asyncio.gather(*(model.link.stop() for model in self.generation.served_models))
        self.monitoring.stop()


def model_name(configuration: GatewayConfiguration) -> str:
    return served_name(configuration.model.model, configuration.text.served_model_name)


def _check_models(models: Sequence[GatewayConfiguration]) -> None:
    """Raises SettingsError if two models have one name, or if a setting is for one model only."""
    names = [model_name(each) for each in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(
            f"several models have the name {', '.join(twice)}: give each a served_model_name of its own"
        )
    if len(models) > 1 and models[0].service.vllm_metric_names:
        raise SettingsError(
            "--vllm-metric-names: vLLM's names count the requests of one model; this gateway has several"
        )


async def serve(configurations: Sequence[GatewayConfiguration]) -> None:
    """Runs a gateway until SIGTERM or SIGINT, then drains and stops it. A second signal stops it at once."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    on_stop_signal(stopping.set, hurrying.set)
    max_connections, max_files = configurations[0].security.max_connections, raise_file_limit()
    if 0 < max_files < max_connections:
        # Warn now: a connection that cannot be accepted later waits without an error.
        log.warning(
            "the limit of open files is below that of connections: raise it (ulimit -Hn)",
            max_files=max_files,
            max_connections=max_connections,
        )
    gateway = Server(*configurations)
    await gateway.start()
    tune_collector()
    try:
        await stopping.wait()
        hurry = asyncio.create_task(hurrying.wait())
        drain = asyncio.create_task(gateway.drain())
        _, unfinished = await asyncio.wait({hurry, drain}, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()
    finally:
        await gateway.stop()
        log.info("stopped")


def main(arguments: list[str] | None = None) -> None:
    description = "Text in, text out: gRPC and the OpenAI API."
    configurations = load_each(GatewayConfiguration, "gateway", description, arguments, of_model=OF_MODEL)
    run_process(
        "gateway",
        configurations[0],
        lambda _: serve(split_models(configurations)),
        (KeyFileError, SettingsError, BlockyardError),
        switch_seconds=None,
    )
