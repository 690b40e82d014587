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


def test_a_folder_is_told_whole_and_anything_else_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_source(ModelSettings("tiny")) == str(tmp_path / "tiny")
    assert model_source(ModelSettings("~/tiny")) == str(tmp_path / "tiny")
    assert model_source(ModelSettings("owner/name")) == "owner/name"
    assert model_source(ModelSettings("/only/at/the/worker")) == "/only/at/the/worker"
    assert model_source(ModelSettings("")) == ""
