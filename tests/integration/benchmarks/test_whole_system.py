"""The whole system as the benchmarks run it: a tiny model, both ways of reading answers, and what it cost."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.kit import models
from benchmarks.kit.processes import cpu_seconds, peak_memory_bytes
from benchmarks.kit.whole_system import Api, WholeSystem, make_requests
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.workload import FreshWorkloads, Workload
from blockyard.local.supervisor import StartError
from blockyard_kernels.cpu.processors import available_instruction_sets
from tests.kit.processes.system import ROOT

SIZE = (3, 40, 9)
WORKLOAD = Workload(*SIZE, vocab_size=320)


def test_requests_are_greedy_and_blind_to_ends():
    specs = make_requests(WORKLOAD)
    assert [list(spec.token_ids.ids) for spec in specs] == WORKLOAD.prompts()
    for spec in specs:
        assert spec.sampling.HasField("temperature")
        assert (spec.sampling.temperature, spec.stop.max_tokens, spec.stop.ignore_eos) == (0.0, 9, True)
        assert spec.return_token_ids


def mapped_files(pid):
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.timeout(60)
async def test_runs_batches_and_accounts_for_them(tmp_path):
    recipe = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)
    settings = Settings(
        str(models.write_model(recipe, tmp_path / "model")),
        "float32",
        cpu_kernels=available_instruction_sets()[-1],
        num_device_blocks=40,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    fresh = FreshWorkloads(320).of(*SIZE)
    async with WholeSystem(settings) as system:
        assert system.first_token_seconds > 0
        assert system.peak_memory_bytes() > 10e6
        assert f"/{settings.cpu_kernels}.so" in mapped_files(system._supervisor.children[0].pid)
        for api in Api:
            run = await system.run(next(fresh), api)
            assert set(run.cpu_seconds) == {"worker", "scheduler", "gateway", "client"}
            assert all(seconds > 0 for seconds in run.cpu_seconds.values())


@pytest.mark.timeout(60)
async def test_a_system_that_cannot_start_leaves_nothing(tmp_path):
    # Nothing is wrong with it but that it has no weights, which the worker finds out.
    (tmp_path / "config.json").write_text((ROOT / "models" / "demo" / "config.json").read_text())
    with pytest.raises(StartError):
        async with WholeSystem(Settings(str(tmp_path))):
            pass


def test_accounts_of_this_process():
    pid = os.getpid()
    before = time.process_time()
    seconds = cpu_seconds(pid)
    sum(range(100_000))
    assert before < seconds < cpu_seconds(pid) < time.process_time()
    assert peak_memory_bytes(pid) > 1e6
