"""Checks what the services need: free ports, certificates, keys, and each other."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.cli.doctor.findings import bad, doubtful, good
from blockyard.local.local_system import choose_ports
from blockyard.security.certificate_expiry import read_validity
from blockyard.security.exposure import check_admin
from blockyard.security.identity import InternalIdentity
from blockyard.security.keys import KeyFileError, read_keys
from blockyard.security.tls import CertificateError, CertificateFiles
from blockyard.service.servers import PortTaken, internal_channel
from blockyard.settings import SettingsError
from blockyard.version import __version__
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.cli.doctor.findings import Finding
    from blockyard.configuration import InternalSecuritySettings, SecuritySettings, SystemConfiguration
    from blockyard.security.identity import ServiceName

ANSWER_SECONDS = 3.0
API_VERSION = "v1"


def look_at_settings(configuration: SystemConfiguration, internal: InternalSecuritySettings) -> Iterator[Finding]:
    """Checks a gateway's ports, admin API, keys and certificates."""
    try:
        choose_ports(configuration.public)
    except PortTaken as error:
        yield bad("ports", str(error), "end what listens there, or choose another port")
    else:
        public = configuration.public
        yield good("ports", f"{public.grpc_port}, {public.http_port} and {public.admin_port} are free")
    try:
        check_admin(configuration.public, configuration.security)
    except SettingsError as error:
        yield bad("admin API", str(error), "see docs/guides/security.md")
    yield from _look_at_keys(configuration.security)
    yield from _look_at_certificates(configuration.security, internal)


def _look_at_keys(security: SecuritySettings) -> Iterator[Finding]:
    if not security.api_keys_file:
        return
    try:
        keys = read_keys(Path(security.api_keys_file))
    except KeyFileError as error:
        yield bad("API keys", str(error), "repair the file, see blockyard keys --help")
        return
    num_expired = sum(key.is_expired(time.time()) for key in keys)
    text = f"{len(keys)} keys, {num_expired} of them have ended"
    if num_expired == len(keys):
        yield bad("API keys", text, "add one with blockyard keys add")
    else:
        yield good("API keys", text)


def _look_at_certificates(security: SecuritySettings, internal: InternalSecuritySettings) -> Iterator[Finding]:
    public = (security.tls_certificate, security.tls_key, security.tls_client_authority)
    try:
        files = CertificateFiles(*public) if any(public) else None
        if files is not None:
            yield look_at_certificate("public certificate", files.current().chain, time.time())
    except CertificateError as error:
        yield bad("public certificate", str(error), "see docs/guides/security.md")
    try:
        files = InternalIdentity(internal).files
        if files is not None:
            yield look_at_certificate("internal certificate", files.current().chain, time.time())
    except CertificateError as error:
        yield bad("internal certificate", str(error), "see docs/guides/security.md")


def look_at_certificate(subject: str, chain: bytes, now: float) -> Finding:
    try:
        validity = read_validity(chain)
    except (ValueError, IndexError):
        return doubtful(subject, "its times cannot be read", "look at it with openssl x509 -text")
    end = f"until {datetime.fromtimestamp(validity.end, UTC):%Y-%m-%d}"
    if now < validity.begin:
        return bad(subject, "not valid yet", "set the clock right, or wait")
    if now >= validity.end:
        return bad(subject, f"valid {end}, which is over", "renew it: a service takes a changed file by itself")
    if now >= validity.warn_at:
        return doubtful(subject, f"valid {end}, which is soon", "renew it: a service takes a changed file by itself")
    return good(subject, f"valid {end}")


async def look_at_service(address: str, service: ServiceName, internal: InternalSecuritySettings) -> Finding:
    """Asks a service for its readiness, and a worker for its API version too."""
    subject = f"{service} {address}"
    try:
        peer = InternalIdentity(internal).peer(service)
    except CertificateError as error:
        return bad(subject, str(error), "give the certificate that the services know one another by")
    async with internal_channel(address, peer) as channel:
        try:
            asked = health_pb2.HealthCheckRequest(service="readiness")
            answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=ANSWER_SECONDS)  # type: ignore[misc]
            if service == "worker":
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=ANSWER_SECONDS)
                if info.api_version != API_VERSION:
                    told = f"speaks {info.api_version}, and {__version__} speaks {API_VERSION}"
                    return bad(subject, told, "run one version everywhere")
        except grpc.aio.AioRpcError as error:
            told = f"{error.code().name}: {error.details()}"
            return bad(subject, told, "start it, or look at address, certificates and network policies")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return doubtful(
            subject, "answers, and is not ready", "its log, and blockyard admin status, say what it waits for"
        )
    return good(subject, "ready")


async def look_at_services(
    schedulers: list[str], workers: list[str], internal: InternalSecuritySettings
) -> list[Finding]:
    """Checks all schedulers and workers concurrently."""
    calls = [look_at_service(each, "scheduler", internal) for each in schedulers]
    calls += [look_at_service(each, "worker", internal) for each in workers]
    return list(await asyncio.gather(*calls))
