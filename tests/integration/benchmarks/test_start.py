"""How a start is measured: stage by stage in a fresh process, and the whole system to its first token."""

import dataclasses

import pytest

from benchmarks import start
from benchmarks.kit import models, worker_start
from benchmarks.kit.whole_system import SERVICES
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.worker_start import Stage, WorkerStart
from benchmarks.throughput import MEMORY_BYTES

RECIPE = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)
STAGES = ["import torch", "import the worker", "load the weights", "count blocks", "make the cache and warm up"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = models.write_model(RECIPE, tmp_path_factory.mktemp("model") / "tiny")
    return Settings(str(folder), num_device_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)


@pytest.mark.timeout(60)
def test_a_worker_starts_in_stages(settings: Settings) -> None:
    told = worker_start.measure(settings)
    assert [stage.name for stage in told.stages] == STAGES
    assert all(stage.seconds > 0 and stage.cpu_seconds > 0 for stage in told.stages)
    held = [stage.resident_bytes for stage in told.stages]
    assert held[0] > 50e6, "torch is there"
    assert max(held) < 2e9
    assert told.kv_pool_bytes == 40 * 32 * 2 * 2 * 2 * 8 * 2, "blocks, tokens, layers, keys and values, heads, width"
    assert 320 * 32 * 2 < told.weights_bytes < 1e6


@pytest.mark.timeout(60)
async def test_a_system_starts_and_fills_its_pool(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "NUM_REQUESTS", 3)
    monkeypatch.setattr(start, "NUM_TOKENS", 64)
    facts = await start.start_system(settings, fills_pool=True)
    assert set(facts) == {"first_token_seconds", "peak_bytes", *SERVICES}
    assert all(value > 0 for value in facts.values())


def test_the_pool_holds_all_requests() -> None:
    options = start.parse(["--model", "somewhere", "--quantization", "int8"])
    settings = start.settings_for(options)
    assert settings.num_device_blocks * settings.block_size >= start.NUM_REQUESTS * start.NUM_TOKENS
    assert (settings.quantization, settings.max_num_seqs) == ("int8", start.NUM_REQUESTS)


def test_of_times_the_least_is_told() -> None:
    workers = [WorkerStart([Stage("one", seconds, seconds / 2, 10**8)], 10**9, 10**8) for seconds in (3.0, 2.0, 4.0)]
    systems = [
        {"first_token_seconds": seconds, "peak_bytes": 1e9 + seconds, **dict.fromkeys(SERVICES, seconds)}
        for seconds in (7.0, 5.0, 6.0)
    ]
    results = start.summarize(systems, workers)
    assert results["limit_bytes"] == 1.25 * 1.1e9 + MEMORY_BYTES
    assert results["peak_bytes"] == 1e9 + 7
    assert results["first_token_seconds"] == {"median": 6.0, "min": 5.0, "max": 7.0}
    lines = start.report(results).splitlines()
    assert lines[0] == "start to first token: 5.00 s (CPU: worker 5.00, scheduler 5.00, gateway 5.00)"
    assert lines[1] == "the worker's peak: 1000 MB, of at most 1675"
    assert lines[3].split() == ["one", "2.00", "1.00", "100"]


def test_a_stage_is_told_from_the_end_of_the_one_before() -> None:
    clock = worker_start.Clock()
    clock.end("first")
    sum(range(100_000))
    clock.end("second")
    assert [stage.name for stage in clock.stages] == ["first", "second"]
    assert clock.stages[1].cpu_seconds > clock.stages[0].cpu_seconds
    assert dataclasses.asdict(clock.stages[0]).keys() == {"name", "seconds", "cpu_seconds", "resident_bytes"}
