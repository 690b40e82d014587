"""What a system with several models starts, and how many of them it holds at a time."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.capacity.replica_plan import Hardware
from blockyard.configuration import SystemConfiguration
from blockyard.local import places
from blockyard.local.local_system import LocalSystem
from blockyard.local.places import count_places
from blockyard.model_config.fallback import Outline
from blockyard.model_files import DEMO_FOLDER
from blockyard.settings import SettingsError, make_parser, resolve, resolve_each
from gateway.config import OF_MODEL, GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.local.supervisor import Service

GIB = 2**30


def configure(**settings: Any) -> SystemConfiguration:
    free = {"grpc_port": 0, "http_port": 0, "admin_port": 0, "device": "cpu"}
    return resolve(SystemConfiguration, {**free, **settings}, environment={})


def make_system(**settings: Any) -> LocalSystem:
    """The models "one" and "two"."""
    both = [{"served_model_name": "one", "max_num_seqs": 7}, {"served_model_name": "two", "data_parallel_size": 2}]
    return LocalSystem(*(configure(max_loaded_models=2, **settings, **each) for each in both))


def read(service: Service, configuration: type[Any]) -> dict[str, Any]:
    return vars(make_parser(configuration, service.name, "").parse_args(list(service.flags)))


async def test_only_the_gateway_runs_from_the_start_and_knows_all_models() -> None:
    system = make_system()
    [gateway] = system.make_services()
    given = read(gateway, GatewayConfiguration)
    configured = resolve_each(GatewayConfiguration, given, OF_MODEL, environment={})
    assert [each.text.served_model_name for each in configured] == ["one", "two"]
    assert [each.service.scheduler_address for each in configured] == [each.scheduler_address for each in system.models]
    assert all(each.service.starts_on_demand for each in configured)
    await system.close()


async def test_each_model_has_services_of_its_own_with_its_settings_and_a_part_of_the_memory() -> None:
    system = make_system(device_memory_utilization=0.8)
    services = [model.make_services() for model in system.models]
    assert [[each.name for each in group] for group in services] == [
        ["one/worker-0", "one/scheduler"],
        ["two/worker-0", "two/worker-1", "two/scheduler"],
    ]
    one, two = (read(group[-1], SchedulerConfiguration) for group in services)
    assert (one["max_num_seqs"], two["max_num_seqs"]) == ("7", "256")
    # Two models are loaded at a time; the second has two workers in the same memory.
    assert (float(one["device_memory_utilization"]), float(two["device_memory_utilization"])) == (0.4, 0.2)
    assert [each.get("wait_for_repair", True) for each in (one, two)] == [True, True]
    sockets = [read(each, WorkerConfiguration)["worker_address"] for group in services for each in group[:-1]]
    assert len({*sockets, one["scheduler_address"], two["scheduler_address"]}) == 5
    await system.close()


@pytest.mark.parametrize("ports", [(0, 0), (41_000, 42_000)])
async def test_no_two_services_share_a_metrics_port(ports: tuple[int, int]) -> None:
    system = make_system(scheduler_metrics_port=ports[0], worker_metrics_port=ports[1])
    endpoints = system.endpoints.metrics
    assert list(endpoints) == ["one/scheduler", "one/worker-0", "two/scheduler", "two/worker-0", "two/worker-1"]
    assert len(set(endpoints.values())) == 5
    await system.close()


async def test_one_model_is_switched_only_if_it_is_unloaded_when_idle() -> None:
    for seconds, names in ((0.0, ["worker-0", "scheduler", "gateway"]), (60.0, ["gateway"])):
        system = LocalSystem(configure(idle_unload_seconds=seconds))
        assert [each.name for each in system.make_services()] == names
        assert system.num_places == 1
        await system.close()


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="several models have the name demo"):
        LocalSystem(configure(), configure())


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A model that takes 5 GiB with a sequence of its whole length, by its config.json."""
    config = {**json.loads((DEMO_FOLDER / "config.json").read_text()), "hidden_size": 4096, "num_hidden_layers": 24}
    config |= {"intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    for file in DEMO_FOLDER.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("gibibytes", "expected"), [(6, 1), (8, 1), (12, 2), (18, 3), (64, 4)])
def test_as_many_models_are_loaded_as_fit_with_their_whole_length(
    large: str, gibibytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = Hardware("4 processors", gibibytes * GIB, gibibytes * GIB, 0, num_threads=4)
    monkeypatch.setattr(places, "find_hardware", lambda _: hardware)
    assert count_places([configure(model=large)] * 4) == expected


def test_the_number_of_models_can_be_chosen() -> None:
    assert count_places([configure(max_loaded_models=2)] * 3) == 2
    assert count_places([configure(max_loaded_models=8)] * 3) == 3


def test_of_a_model_whose_memory_is_not_known_one_is_loaded_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "read_model", lambda *_: Outline("Foreign", "bfloat16"))
    assert count_places([configure()] * 3) == 1
    assert "one model is loaded at a time" in caplog.text
