"""When certificates end: as another library reads them, in metrics, and in the log in good time."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from blockyard.configuration import InternalSecuritySettings
from blockyard.security.certificate_expiry import DAY_SECONDS, CertificateWatch, read_validity
from blockyard.security.tls import CertificateFiles
from scheduler_service.config import SchedulerConfiguration, ServiceSettings
from scheduler_service.server import Server
from tests.kit.authority import Authority, Pair
from tests.kit.processes.scrape import Scrape

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def files_of(pair: Pair) -> CertificateFiles:
    return CertificateFiles(str(pair.certificate), str(pair.key))


@pytest.mark.parametrize("days", [-1, 1, 400, 365 * 40, 365 * 300])
def test_times_are_those_that_another_library_reads(authority: Authority, days: int) -> None:
    content = authority.issue("a", valid=timedelta(days=days)).certificate.read_bytes()
    told, validity = x509.load_pem_x509_certificate(content), read_validity(content)
    assert validity.begin == told.not_valid_before_utc.timestamp()
    assert validity.end == told.not_valid_after_utc.timestamp()


def test_of_a_chain_the_certificate_that_ends_first_counts(authority: Authority) -> None:
    long = authority.issue("a", valid=timedelta(days=90)).certificate.read_bytes()
    short = authority.issue("b", valid=timedelta(days=30)).certificate.read_bytes()
    assert read_validity(long + short) == read_validity(short + long) == read_validity(short)


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_what_holds_no_certificate_has_no_end(content: bytes) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        read_validity(content)


# The authority's certificates begin two days before they are made.
@pytest.mark.parametrize(
    ("valid_days", "in_days", "said"),
    [
        (88, 0, None),
        (88, 73, None),
        (88, 75, "a certificate ends soon"),
        (88, 89, "a certificate has ended"),
        (5, 3.5, None),
        (5, 3.7, "a certificate ends soon"),
    ],
)
def test_it_is_said_in_good_time_which_certificate_ends(
    authority: Authority, caplog: pytest.LogCaptureFixture, valid_days: int, in_days: float, said: str | None
) -> None:
    files = files_of(authority.issue("a", valid=timedelta(days=valid_days)))
    watch = CertificateWatch({"public": files, "internal": None}, lambda: time.time() + in_days * DAY_SECONDS)
    watch.check()
    assert [record.message for record in caplog.records] == ([said] if said else [])


def test_it_is_said_once_a_day_and_not_of_one_that_was_replaced(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time()
    files = files_of(authority.issue("a", valid=timedelta(hours=3)))
    watch = CertificateWatch({"public": files}, lambda: now)
    for _ in range(3):
        watch.check()
    assert len(caplog.records) == 1
    now += DAY_SECONDS
    watch.check()
    assert len(caplog.records) == 2
    authority.issue("a", valid=timedelta(days=400))
    now += DAY_SECONDS
    watch.check()
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 2


async def test_a_service_tells_when_the_certificate_ends_that_it_shows(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("scheduler", names=["scheduler.blockyard"], valid=timedelta(hours=5))
    server = Server(
        SchedulerConfiguration(
            service=ServiceSettings(scheduler_address=f"unix:{tmp_path}/s", worker_address=f"unix:{tmp_path}/w"),
            internal=InternalSecuritySettings(
                **pair.settings("internal"), internal_authority=str(authority.certificate)
            ),
        )
    )
    await server.start()
    try:
        registry = server.service.metrics.registry
        seen = Scrape((await asyncio.to_thread(registry.encode))[0].decode())
    finally:
        await server.stop()
    end = read_validity(pair.certificate.read_bytes()).end
    assert seen.sum("blockyard_certificate_expiry_time_seconds", certificate="internal") == end
    assert [record for record in caplog.records if record.message == "a certificate ends soon"]
