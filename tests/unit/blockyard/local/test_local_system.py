"""Flags, ports and sockets of the three services on one machine."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard.configuration import (
    CHOSEN_TOGETHER,
    DeviceSettings,
    GatewayProcessSettings,
    LogSettings,
    MetricsSettings,
    ModelSettings,
    ParallelSettings,
    PublicSettings,
    ReplicaSettings,
    SecuritySettings,
    SystemConfiguration,
    WorkerProcessSettings,
)
from blockyard.errors import BlockyardError, Reason
from blockyard.local.local_system import MAX_FOLDER_BYTES, LocalSystem, choose_ports, without_settings
from blockyard.local.metrics_ports import MetricsPorts
from blockyard.model_files import DEMO_FOLDER
from blockyard.service.servers import PortTaken
from blockyard.settings import SettingsError, make_parser, resolve, settings_of
from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

if TYPE_CHECKING:
    from blockyard.local.supervisor import Service
    from blockyard.settings import Setting
    from tests.kit.fakes.fake_gateway import FakeGateway

FREE = PublicSettings(grpc_port=0, http_port=0, admin_port=0)


def system(model: str = "", **sections: object) -> LocalSystem:
    return LocalSystem(SystemConfiguration(model=ModelSettings(model=model), public=FREE, **sections))  # type: ignore[arg-type]


async def test_the_services_understand_their_flags() -> None:
    local = system(log=LogSettings("debug", "json"))
    for service, configuration in zip(
        local.make_services(), (WorkerConfiguration, SchedulerConfiguration, GatewayConfiguration), strict=True
    ):
        given = vars(make_parser(configuration, service.name, "").parse_args(list(service.flags)))
        assert given["log_level"] == "debug"
    await local.close()


@pytest.mark.parametrize(
    ("name", "configuration"),
    [("worker-0", WorkerConfiguration), ("scheduler", SchedulerConfiguration), ("gateway", GatewayConfiguration)],
)
async def test_every_setting_reaches_its_service(name: str, configuration: type[object]) -> None:
    """Each gets all its settings as flags, with the value of the system's; what is chosen has a value of its own."""
    changed = {
        setting.name: other_value(setting)
        for setting in settings_of(SystemConfiguration)
        if setting.name not in ("model", "host", "admin_host")
        and setting.section != "switching"
        and not setting.name.endswith("_port")
    }
    local = LocalSystem(resolve(SystemConfiguration, {**changed, "grpc_port": 0, "http_port": 0, "admin_port": 0}))
    (service,) = (each for each in local.make_services() if each.name == name)
    given = vars(make_parser(configuration, name, "").parse_args(list(service.flags)))
    await local.close()
    for setting in settings_of(configuration):
        if setting.name in changed and setting.name not in ("device_memory_utilization", "num_threads"):
            assert str(given[setting.name]) == str(changed[setting.name]), setting.name
        elif setting.name not in CHOSEN_TOGETHER:
            assert setting.name in given


def other_value(setting: Setting) -> object:
    """A legal value that is not the default."""
    if setting.type is bool:
        return not setting.default
    if setting.name == "allowed_origins":
        return "https://example.org"
    if setting.name == "lora_modules":
        return "sql=/adapters/sql"
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    if setting.name in ("data_parallel_size", "tensor_parallel_size"):
        return 2
    if isinstance(setting.default, str):
        return 7 if setting.default == "auto" and setting.type is not str else "x"
    return 0.5 if isinstance(setting.default, float) else 7


async def test_the_gateway_gets_the_time_that_it_may_drain() -> None:
    local = system(gateway_process=GatewayProcessSettings(drain_seconds=120.0))
    assert local.make_services()[-1].grace_seconds > 120.0
    await local.close()


def test_a_model_that_cannot_be_served_is_told_in_one_line_before_anything_starts(tmp_path: Path) -> None:
    config = {**json.loads((DEMO_FOLDER / "config.json").read_text()), "hidden_act": "xielu", "attention_bias": "yes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # The port is not looked at.
        public = PublicSettings(grpc_port=taken.getsockname()[1], http_port=0, admin_port=0)
        with pytest.raises(BlockyardError) as caught:
            LocalSystem(SystemConfiguration(model=ModelSettings(model=str(tmp_path)), public=public))
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    assert caught.value.message == (
        "config.json: attention_bias must be true or false, not 'yes'; config.json: hidden_act is 'xielu', not "
        "supported (supported: silu, swish, gelu, gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, relu2)"
    )


async def test_the_services_find_each_other_on_private_sockets() -> None:
    local = system()
    worker, scheduler, gateway = local.make_services()
    (at_worker,) = (flag for flag in worker.flags if flag.startswith("--worker-address="))
    (at_scheduler,) = (flag for flag in scheduler.flags if flag.startswith("--scheduler-address="))
    assert at_worker in scheduler.flags
    assert at_scheduler in gateway.flags
    folder = Path(at_worker.partition("unix:")[2]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(at_scheduler.partition("unix:")[2]) <= 107
    await local.close()
    assert not folder.exists()


async def test_the_services_need_no_certificates_among_themselves() -> None:
    local = system(security=SecuritySettings(api_keys_file="keys.yaml"))
    *others, gateway = local.make_services()
    for service in (*others, gateway):
        assert flag_of(service, "internal-certificate") == ""
        assert service is gateway or "--api-keys-file=keys.yaml" not in service.flags
    assert flag_of(gateway, "api-keys-file") == "keys.yaml"
    assert flag_of(gateway, "gateway-local-address") == local.endpoints.local
    await local.close()


def flag_of(service: Service, name: str) -> str:
    (value,) = (flag.partition("=")[2] for flag in service.flags if flag.startswith(f"--{name}="))
    return value


async def test_several_workers_share_the_machine() -> None:
    local = system(replicas=ReplicaSettings(3), device=DeviceSettings(device_memory_utilization=0.6))
    *workers, scheduler, _ = local.make_services()
    assert [worker.name for worker in workers] == ["worker-0", "worker-1", "worker-2"]
    addresses = [flag_of(worker, "worker-address") for worker in workers]
    assert len(set(addresses)) == 3
    assert flag_of(scheduler, "worker-address") == ",".join(addresses)
    assert float(flag_of(scheduler, "device-memory-utilization")) == pytest.approx(0.2)
    num_processors = len(os.sched_getaffinity(0))
    assert {int(flag_of(worker, "num-threads")) for worker in workers} == {max(1, num_processors // 3)}
    await local.close()


async def test_the_workers_of_a_replica_are_named_together() -> None:
    local = system(replicas=ReplicaSettings(2), parallel=ParallelSettings(tensor_parallel_size=2))
    *workers, scheduler, _ = local.make_services()
    assert [worker.name for worker in workers] == ["worker-0", "worker-1", "worker-2", "worker-3"]
    one, two, three, four = (flag_of(worker, "worker-address") for worker in workers)
    assert flag_of(scheduler, "worker-address") == f"{one}+{two},{three}+{four}"
    assert flag_of(scheduler, "tensor-parallel-size") == "2"
    num_processors = len(os.sched_getaffinity(0))
    assert {int(flag_of(worker, "num-threads")) for worker in workers} == {max(1, num_processors // 4)}
    await local.close()


@pytest.fixture(params=[3])
def gpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device files as a machine with so many GPUs has them."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(request.param))):
        (tmp_path / name).touch()
    monkeypatch.setattr("blockyard.local.gpus.DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("num_replicas", "size", "visible", "indices", "share"),
    [
        (1, 1, None, "0", 0.6),
        (3, 1, None, "012", 0.6),
        (2, 2, None, "0120", 0.3),
        (2, 1, "1", "00", 0.3),
        (2, 2, "GPU-a,GPU-b", "0101", 0.3),
        (2, 1, "", "00", 0.3),
    ],
)
async def test_each_worker_has_a_gpu_of_its_own_as_far_as_there_are(
    gpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_replicas: int,
    size: int,
    visible: str | None,
    indices: str,
    share: float,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sections = {"replicas": ReplicaSettings(num_replicas), "parallel": ParallelSettings(size)}
    local = system(**sections, device=DeviceSettings(device_memory_utilization=0.6))
    *workers, scheduler, _ = local.make_services()
    assert "".join(flag_of(worker, "worker-device-index") for worker in workers) == indices
    assert float(flag_of(scheduler, "device-memory-utilization")) == pytest.approx(share)
    await local.close()


async def test_a_replica_of_more_workers_than_gpus_is_refused(gpus: Path) -> None:
    parallel = ParallelSettings(4)
    with pytest.raises(SettingsError, match=r"4 workers needs as many GPUs, and there are 3 here.*--device cpu"):
        system(parallel=parallel)
    local = system(parallel=parallel, device=DeviceSettings("cpu"))
    *workers, _, _ = local.make_services()
    assert {flag_of(worker, "worker-device-index") for worker in workers} == {"0"}
    await local.close()


@pytest.mark.parametrize(
    ("told", "workers"),
    [((50062, 50072), ["50072", "50073", "50074"]), ((-1, -1), ["-1"] * 3)],
)
async def test_each_worker_has_a_port_of_its_own_for_metrics(told: tuple[int, int], workers: list[str]) -> None:
    local = system(replicas=ReplicaSettings(3), metrics=MetricsSettings(*told))
    assert [flag_of(service, "worker-metrics-port") for service in local.make_services()[:-2]] == workers
    assert flag_of(local.make_services()[-2], "scheduler-metrics-port") == str(told[0])
    names = ["scheduler", "worker-0", "worker-1", "worker-2"] if told[0] > 0 else []
    assert list(local.endpoints.metrics) == names
    await local.close()


async def test_metrics_have_free_ports_that_no_other_system_gets() -> None:
    first, second = system(replicas=ReplicaSettings(2)), system(replicas=ReplicaSettings(2))
    told = [*first.endpoints.metrics.values(), *second.endpoints.metrics.values()]
    assert len(set(told)) == 6
    assert all(address.startswith("127.0.0.1:") for address in told)
    for local in (first, second):
        given = [flag_of(service, "worker-metrics-port") for service in local.make_services()[:-2]]
        given.append(flag_of(local.make_services()[-2], "scheduler-metrics-port"))
        assert sorted(f"127.0.0.1:{port}" for port in given) == sorted(local.endpoints.metrics.values())
        await local.close()


def test_a_port_that_somebody_has_is_passed_over_and_one_that_was_let_go_is_not() -> None:
    here, there = MetricsPorts(), MetricsPorts()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert here.choose(0, taken) > taken
    port = here.choose(0, 50_062)
    assert there.choose(0, port) > port
    here.close()
    assert there.choose(0, port) == port
    there.close()
    assert there.choose(-1, port) == -1
    assert there.choose(7, port) == 7


@pytest.mark.parametrize(("num_workers", "num_threads", "expected"), [(1, 0, 0), (1, 3, 3), (64, 0, 1), (64, 3, 3)])
async def test_threads_are_as_told_or_a_part(num_workers: int, num_threads: int, expected: int) -> None:
    local = system(replicas=ReplicaSettings(num_workers), worker=WorkerProcessSettings(num_threads))
    assert {flag_of(worker, "num-threads") for worker in local.make_services()[:-2]} == {str(expected)}
    assert all(len(flag_of(worker, "worker-address")) <= 107 + len("unix:") for worker in local.make_services()[:-2])
    await local.close()


async def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    local = system()
    assert len(os.fsencode(local._folder)) <= MAX_FOLDER_BYTES
    assert list(long.iterdir()) == []
    await local.close()


async def test_free_ports_are_told_and_differ() -> None:
    local = system()
    public = local.configuration.public
    ports = [public.grpc_port, public.http_port, public.admin_port]
    assert len(set(ports)) == 3
    assert all(ports)
    assert local.endpoints.http == f"127.0.0.1:{public.http_port}"
    assert f"--grpc-port={public.grpc_port}" in local.make_services()[-1].flags
    await local.close()


@pytest.mark.parametrize("name", ["grpc_port", "http_port", "admin_port"])
@pytest.mark.parametrize("taken_on", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("asked_on", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_an_error_that_names_its_flag(name: str, taken_on: str, asked_on: str) -> None:
    with socket.create_server((taken_on, 0)) as taken:
        port = taken.getsockname()[1]
        public = dataclasses.replace(FREE, host=asked_on, **{name: port})
        with pytest.raises(PortTaken, match=f":{port}: .*in use; choose another --{name.replace('_', '-')}"):
            choose_ports(public)


def test_two_fronts_on_one_port_are_an_error() -> None:
    free = choose_ports(FREE).grpc_port
    with pytest.raises(PortTaken, match="--http-port"):
        choose_ports(PublicSettings(grpc_port=free, http_port=free, admin_port=0))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_of_somewhere_else_is_an_error(host: str) -> None:
    with pytest.raises(PortTaken, match=host):
        choose_ports(dataclasses.replace(FREE, host=host))


@pytest.mark.parametrize(("host", "reached_at"), [("0.0.0.0", "127.0.0.1:"), ("::", "[::1]:"), ("::1", "[::1]:")])
async def test_a_wildcard_is_reached_on_the_loopback(host: str, reached_at: str) -> None:
    local = LocalSystem(SystemConfiguration(public=dataclasses.replace(FREE, host=host)))
    assert local.endpoints.grpc.startswith(reached_at)
    await local.close()


def test_a_model_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(BlockyardError) as caught:
        system(model=str(tmp_path))
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


async def test_readiness_is_the_gateways(async_gateway: FakeGateway) -> None:
    local = system()
    assert not await local.is_ready()
    assert await local.find_missing() == "the gateway does not answer"
    local.endpoints = dataclasses.replace(local.endpoints, local=async_gateway.target)
    assert await local.is_ready()
    async_gateway.ready = False
    assert not await local.is_ready()
    await local.close()


async def test_it_names_the_replica_that_is_missing(async_gateway: FakeGateway) -> None:
    local = system(replicas=ReplicaSettings(data_parallel_size=2))
    local.endpoints = dataclasses.replace(local.endpoints, local=async_gateway.target)
    for replicas, missing in (
        ((True,), "the scheduler has 1 of 2 replicas"),
        ((True, False), "replica 1 is not ready: no worker answers"),
        ((True, True), ""),
    ):
        async_gateway.replicas = replicas
        # One is enough to serve.
        assert await local.is_ready()
        assert (await local.find_missing(), await local.are_all_ready()) == (missing, not missing)
    await local.close()


def test_settings_do_not_reach_the_services_twice() -> None:
    environment = {"BLOCKYARD_MODEL": "m", "BLOCKYARD_CONFIG": "f", "BLOCKYARD_TARGET": "t", "PATH": "p"}
    assert without_settings(environment) == {"BLOCKYARD_TARGET": "t", "PATH": "p"}


@pytest.mark.parametrize("admin_host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_admin_api_that_others_reach_needs_keys(admin_host: str) -> None:
    public = dataclasses.replace(FREE, admin_host=admin_host)
    with pytest.raises(SettingsError, match=f"--admin-host {admin_host} .*--api-keys-file"):
        LocalSystem(SystemConfiguration(public=public))


async def test_a_host_that_is_open_leaves_the_admin_api_on_this_machine() -> None:
    local = LocalSystem(SystemConfiguration(public=dataclasses.replace(FREE, host="0.0.0.0")))
    assert flag_of(local.make_services()[-1], "admin-host") == "127.0.0.1"
    assert local.endpoints.admin == f"127.0.0.1:{local.configuration.public.admin_port}"
    await local.close()


@pytest.mark.parametrize(
    "security", [SecuritySettings(api_keys_file="keys.yaml"), SecuritySettings(tls_client_authority="authority.pem")]
)
async def test_an_admin_api_that_is_guarded_may_be_open(security: SecuritySettings) -> None:
    public = dataclasses.replace(FREE, admin_host="0.0.0.0")
    local = LocalSystem(SystemConfiguration(public=public, security=security))
    assert flag_of(local.make_services()[-1], "admin-host") == "0.0.0.0"
    await local.close()


async def prepared(monkeypatch: pytest.MonkeyPatch, compiler: str, folder: Path, **sections: object) -> list[str]:
    """What an installed package says before its services start, with this program as the compiler."""
    script = folder / "compiler"
    script.write_text(compiler)
    script.chmod(0o755)
    monkeypatch.setattr("blockyard.local.local_system.IS_INSTALLED", True)
    monkeypatch.setattr("blockyard.local.gpus.DEVICES", folder / "no-gpu")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("BLOCKYARD_KERNELS_DIR", str(folder / "kernels"))
    lines: list[str] = []
    local = system(**sections)
    await local.prepare(lines.append)
    await local.close()
    return lines


def libraries(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.so")}


WRITES_A_LIBRARY = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n'


async def test_an_installed_package_compiles_its_kernels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = await prepared(monkeypatch, WRITES_A_LIBRARY, tmp_path)
    assert line.startswith("compiling the CPU kernels, once")
    assert libraries(tmp_path) == {"amx.so", "avx512_bf16.so", "avx512.so", "avx2.so"}
    assert await prepared(monkeypatch, "#!/bin/sh\nexit 1\n", tmp_path) == []


async def test_a_package_whose_kernels_cannot_be_compiled_says_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = await prepared(monkeypatch, "#!/bin/sh\nexit 1\n", tmp_path)
    assert lines[-1] == "the CPU kernels cannot be compiled here: torch computes, which is slower"


@pytest.mark.parametrize(
    "sections",
    [
        {"device": DeviceSettings(device="cuda")},
        {"worker": WorkerProcessSettings(cpu_kernels="reference")},
    ],
)
async def test_kernels_that_nobody_uses_are_not_compiled(
    sections: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await prepared(monkeypatch, WRITES_A_LIBRARY, tmp_path, **sections) == []
    assert libraries(tmp_path) == set()
