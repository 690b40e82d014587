from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.configuration import ModelSettings
from blockyard.settings import SettingsError, resolve
from scheduler_service.config import SchedulerConfiguration, model_source

if TYPE_CHECKING:
    from pathlib import Path


def test_defaults() -> None:
    service = resolve(SchedulerConfiguration, {}, environment={}).service
    assert service.scheduler_address == "127.0.0.1:50060"
    assert service.worker_address == "127.0.0.1:50070"
    assert (service.scheduler_health_port, service.debug_integrity) == (-1, False)


@pytest.mark.parametrize("port", ["-2", "65536", "http"])
def test_a_health_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(SettingsError, match="scheduler-health-port"):
        resolve(SchedulerConfiguration, {"scheduler_health_port": port}, environment={})


@pytest.mark.parametrize(
    ("size", "problem"),
    [("3", "a power of two"), ("0", "greater than or equal to 1"), ("16", "less than or equal to 8")],
)
def test_a_number_of_tensor_parallel_workers_that_is_none_is_refused(size: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"--tensor-parallel-size: .{size}.: .*{problem}"):
        resolve(SchedulerConfiguration, {"tensor_parallel_size": size}, environment={})


def test_the_sizes_of_a_replica() -> None:
    sizes = {"tensor_parallel_size": "4", "pipeline_parallel_size": "2"}
    parallel = resolve(SchedulerConfiguration, sizes, environment={}).parallel
    assert (parallel.world_size, parallel.num_virtual_engines) == (8, 3)
    parallel = resolve(SchedulerConfiguration, {}, environment={}).parallel
    assert (parallel.world_size, parallel.num_virtual_engines) == (1, 1)


def test_a_folder_is_told_whole_and_anything_else_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_source(ModelSettings("tiny")) == str(tmp_path / "tiny")
    assert model_source(ModelSettings("~/tiny")) == str(tmp_path / "tiny")
    assert model_source(ModelSettings("owner/name")) == "owner/name"
    assert model_source(ModelSettings("/only/at/the/worker")) == "/only/at/the/worker"
    assert model_source(ModelSettings("")) == ""
