"""How a start is measured: stage by stage in a fresh process, and the whole system to its first token."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.kit import models, worker_start
from benchmarks.kit.whole_system import SERVICES
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.worker_start import Stage, WorkerStart
from benchmarks.start import Starts
from benchmarks.throughput import MEMORY_BYTES

RECIPE = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)
STAGES = ["until it answers", "load the weights", "count blocks", "make the cache and warm up"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = models.write_model(RECIPE, tmp_path_factory.mktemp("model") / "tiny")
    return Settings(str(folder), num_device_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)


@pytest.mark.timeout(60)
def test_workers_start_in_stages(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "WAYS", ("packed",))
    cache, starts = tmp_path / "cache", dict[str, Starts]()
    first = asyncio.run(worker_start.measure(dataclasses.replace(settings, packed_cache=str(cache))))
    assert [stage.name for stage in first.stages] == STAGES
    assert all(stage.seconds > 0 and stage.cpu_seconds > 0 for stage in first.stages)
    assert 50e6 < max(stage.resident_bytes for stage in first.stages) < 2e9, "torch is there"
    assert first.kv_pool_bytes == 40 * 32 * 2 * 2 * 2 * 8 * 2, "blocks, tokens, layers, keys and values, heads, width"
    assert 320 * 32 * 2 < first.weights_bytes < 1e6
    start.start_workers(settings, cache, starts, is_cold=True)
    (found,) = starts.values()
    assert starts.keys() == {"packed, cold"}
    assert [stage.name for stage in found.workers[0].stages] == STAGES
    assert len(found.dd_seconds) == 1


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
    def starts(*seconds: float) -> Starts:
        workers = [WorkerStart([Stage(worker_start.LOAD, each, each / 2, 10**8)], 10**9, 10**8) for each in seconds]
        return Starts(workers, [1.0, 0.5, 1.0])

    systems = [
        {"first_token_seconds": seconds, "peak_bytes": 1e9 + seconds, **dict.fromkeys(SERVICES, seconds)}
        for seconds in (7.0, 5.0, 6.0)
    ]
    results = start.summarize(systems, {"files": starts(3.0, 2.0, 4.0), "packed": starts(1.5, 1.0, 1.0)})
    assert results["limit_bytes"] == 1.25 * 1.1e9 + MEMORY_BYTES
    assert results["peak_bytes"] == 1e9 + 7
    assert results["first_token_seconds"] == {"median": 6.0, "min": 5.0, "max": 7.0}
    assert results["packed_per_files"] == {"packed": {"median": 0.5, "min": 0.25, "max": 0.5}}
    lines = start.report(results).splitlines()
    assert lines[0] == "start to first token: 5.00 s (CPU: worker 5.00, scheduler 5.00, gateway 5.00)"
    assert lines[1] == "the worker's peak: 1000 MB, of at most 1675"
    assert lines[3].split() == [*worker_start.LOAD.split(), "2.00", "1.00", "100"]
    assert lines[4].split() == ["all", "of", "it", "2.00", "its", "load", "is", "4.00", "x", "dd"]
    assert lines[-1] == "packed / files: 0.50 (0.25–0.50)"
