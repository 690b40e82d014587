"""Starts and stops the gateway's process: tokenizer, link to the scheduler, fronts, and health checks."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.addresses import join_address
from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.errors import BlockyardError, Reason
from blockyard.model_files import resolve_model
from blockyard.security.exposure import check_admin
from blockyard.security.identity import InternalIdentity
from blockyard.security.keys import KeyFileError
from blockyard.service.interceptors import CallCounter
from blockyard.service.process import Monitoring, raise_file_limit, run_process, tune_collector
from blockyard.service.servers import bind, make_server
from blockyard.service.signals import on_stop_signal
from blockyard.settings import SettingsError, load
from blockyard.telemetry import EventLogger
from gateway.access import make_access
from gateway.config import GatewayConfiguration
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
from gateway.observe.metrics import GatewayMetrics
from gateway.observe.scheduler_readings import SchedulerReadings
from gateway.observe.vllm_metrics import add_vllm_names
from gateway.pooling.model import read_model_rule
from gateway.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    import grpc.aio

    from blockyard.security.authentication import Gate

log = EventLogger(__name__)

# The time for streams to end before they are closed.
_GRACE_SECONDS = 2.0
_DEMO_NAME = "demo"
_STOPPED = "the gateway stopped before the answer ended, which goes on: resume it at another gateway"


class Server:
    """The gateway's process.

    Attributes:
        generation: the core that all fronts use.
        metrics: the metrics that Prometheus scrapes.
        grpc_port, http_port, admin_port: the ports on which the gateway listens; 0 before `start`.
        monitoring: the servers for health and metrics on other ports.
    """

    def __init__(self, configuration: GatewayConfiguration) -> None:
        """Reads all files; raises BlockyardError MODEL_NOT_LOADED, CertificateError, KeyFileError or SettingsError."""
        self._public = configuration.public
        self._service = configuration.service
        self.grpc_port = self.http_port = self.admin_port = 0
        check_admin(configuration.public, configuration.security)
        self._access = make_access(configuration.security)
        identity = InternalIdentity(configuration.internal)
        gateway_id = secrets.token_hex(8)
        folder = resolve_model(configuration.model.model, configuration.model.revision, "tokenizer")
        template, dialect = configuration.text.chat_template, configuration.text.dialect
        tokenizer = load_tokenizer(folder, chat_template_file=Path(template) if template else None, dialect=dialect)
        self._link = SchedulerLink(
            configuration.service.scheduler_address,
            gateway_id=gateway_id,
            model_digest=tokenizer.model_digest,
            peer=identity.peer("scheduler"),
        )
        self.metrics = GatewayMetrics()
        self._live = LiveRequests(
            self._link,
            metrics=self.metrics,
            resume_window_seconds=configuration.resume.resume_window_seconds,
            max_scheduler_wait_seconds=configuration.service.max_scheduler_wait_seconds,
        )
        self.generation = GenerationService(
            tokenizer,
            self._link,
            self._live,
            model_name=model_name(configuration),
            seed=configuration.text.seed,
            clamps_max_tokens=configuration.text.clamp_max_tokens,
            max_requests=configuration.service.max_requests,
            lora_root=Path(root) if (root := configuration.service.gateway_lora_root) else None,
            read_rule=lambda task: read_model_rule(folder, task),
        )
        # Do not capture `self`: a server that cannot start would be kept alive until the interpreter ends.
        live, link = self._live, self._link
        self.metrics.watch(
            num_requests=lambda: live.num_running,
            num_readers=lambda: live.num_readers,
            is_attached=lambda: link.takes_requests,
            is_ready=self.generation.is_ready,
            models=self.generation.models,
        )
        self._readings = SchedulerReadings(lambda: link.takes_requests, link.read_scheduler)
        self.metrics.watch_scheduler(self._readings, self.generation.model_name)
        if configuration.service.vllm_metric_names:
            add_vllm_names(self.metrics, self._readings, self.generation.model_name)
        certificates = {"public": self._access.files, "internal": identity.files}
        self.monitoring = Monitoring(self.metrics.registry, certificates, self.generation.is_ready)
        administration = AdminServicer(self.generation, self._link, gateway_id=gateway_id)
        self._servers = self._make_servers(administration)
        app = make_http_app(self.generation)
        if configuration.public.enable_page:
            add_page(app, StatusBoard(administration.status))
        add_metrics(app, self.metrics)
        self._admin_http = HttpFront(make_admin_app(administration), replace(self._access, api=self._access.admin))
        self._http = HttpFront(app, self._access, self.metrics, allowed_origins=configuration.public.allowed_origins)

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
        self._link.start(self._live.on_progress, self._live.on_scheduler_lost)
        self._readings.start()
        for server in self._servers:
            await server.start()
        self._http.start()
        self._access.warn_if_exposed(host)
        log.info(
            "listening",
            model=self.generation.model_name,
            dialect=dialect.name if (dialect := self.generation.tokenizer.dialect) else "none",
            grpc=join_address(host, self.grpc_port),
            http=join_address(host, self.http_port),
            admin=join_address(admin_host, self.admin_port),
            metrics=join_address(host, self.monitoring.metrics_port) if self.monitoring.metrics_port else None,
            scheduler=self._service.scheduler_address,
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
        await self._link.stop()
        self.monitoring.stop()


def model_name(configuration: GatewayConfiguration) -> str:
    """Returns the model's name in requests: --served-model-name, else the last part of --model."""
    model = configuration.model.model.rstrip("/")
    return configuration.text.served_model_name or (Path(model).absolute().name if model else _DEMO_NAME)


async def serve(configuration: GatewayConfiguration) -> None:
    """Runs a gateway until SIGTERM or SIGINT, then drains and stops it. A second signal stops it at once."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    on_stop_signal(stopping.set, hurrying.set)
    max_connections, max_files = configuration.security.max_connections, raise_file_limit()
    if 0 < max_files < max_connections:
        # Warn now: a connection that cannot be accepted later waits without an error.
        log.warning(
            "the limit of open files is below that of connections: raise it (ulimit -Hn)",
            max_files=max_files,
            max_connections=max_connections,
        )
    gateway = Server(configuration)
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
    configuration = load(GatewayConfiguration, "gateway", "Text in, text out: gRPC and the OpenAI API.", arguments)
    run_process("gateway", configuration, serve, (KeyFileError, SettingsError, BlockyardError), switch_seconds=None)
