"""Several workers that are started together: what each is told, and how their health becomes one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from blockyard.service.health import HealthServer
from blockyard.service.healthcheck import check
from blockyard.settings import SettingsError, make_parser, resolve, to_flags
from worker_service.config import WorkerConfiguration, WorkerSettings
from worker_service.processes import divide, make_health

if TYPE_CHECKING:
    from collections.abc import Iterator

SEVERAL = WorkerSettings(
    worker_address="0.0.0.0:50080",
    num_workers=3,
    worker_health_port=50090,
    worker_metrics_port=50072,
    worker_group="g",
    num_threads=2,
)


def test_each_has_a_place_a_device_and_ports_of_its_own() -> None:
    told = [
        (own.worker_address, own.worker_health_port, own.worker_metrics_port, own.worker_index, own.worker_device_index)
        for own in divide(SEVERAL)
    ]
    assert told == [
        ("0.0.0.0:50080", 50091, 50072, 0, 0),
        ("0.0.0.0:50081", 50092, 50073, 1, 1),
        ("0.0.0.0:50082", 50093, 50074, 2, 2),
    ]
    same = {dataclasses.replace(own, **changing(SEVERAL)) for own in divide(SEVERAL)}
    assert same == {dataclasses.replace(SEVERAL, num_workers=1)}


def changing(settings: WorkerSettings) -> dict[str, object]:
    names = ("worker_address", "worker_health_port", "worker_metrics_port", "worker_index", "worker_device_index")
    return {name: getattr(settings, name) for name in names}


def test_sockets_are_numbered_places_go_on_and_who_does_not_listen_stays_so() -> None:
    settings = WorkerSettings(worker_address="unix:/tmp/w", num_workers=2, worker_index=4, worker_device_index=2)
    one, two = divide(settings)
    assert (one.worker_address, two.worker_address) == ("unix:/tmp/w-0", "unix:/tmp/w-1")
    assert (one.worker_index, two.worker_index) == (4, 5)
    assert (one.worker_device_index, two.worker_device_index) == (2, 3)
    assert {own.worker_health_port for own in (one, two)} == {own.worker_metrics_port for own in (one, two)} == {-1}


def test_what_each_is_told_can_be_read() -> None:
    for own in divide(SEVERAL):
        flags = vars(make_parser(WorkerConfiguration, "", "").parse_args(to_flags(own)))
        # The parent's environment is theirs, too.
        assert resolve(WorkerConfiguration, flags, environment={"BLOCKYARD_NUM_WORKERS": "3"}).worker == own


@pytest.mark.parametrize(
    "left_to_chance", [{"worker_address": "127.0.0.1:0"}, {"worker_health_port": 0}, {"worker_metrics_port": 0}]
)
def test_ports_that_are_left_to_chance_are_refused(left_to_chance: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="needs fixed ports"):
        divide(dataclasses.replace(SEVERAL, **left_to_chance))  # type: ignore[arg-type]


@pytest.fixture(params=["all", "one"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[WorkerSettings]]:
    """Where two workers' health answers; the second one has not loaded where only one has."""
    servers = [
        HealthServer(lambda: True, lambda: True, {"loaded": lambda has=has: has})
        for has in (True, request.param == "all")
    ]
    address = "127.0.0.1:1"
    yield [WorkerSettings(address, worker_health_port=server.start("127.0.0.1:0")) for server in servers]
    for server in servers:
        server.stop()


def test_what_does_not_hold_for_one_does_not_hold_for_all(
    workers: list[WorkerSettings], request: pytest.FixtureRequest
) -> None:
    health = make_health(workers)
    try:
        address = f"127.0.0.1:{health.start('127.0.0.1:0')}"
        assert {check(address, name) for name in ("", "readiness", "liveness")} == {""}
        told = check(address, "loaded")
        assert told == ("" if request.node.callspec.params["workers"] == "all" else f"{address}: loaded is NOT_SERVING")
    finally:
        health.stop()
