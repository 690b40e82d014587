"""What benchmarks/throughput.py makes of its command line and of its samples."""

from collections import Counter

import pytest

from benchmarks import throughput
from benchmarks.kernels.ceilings import Ceilings, Rate
from benchmarks.kit import ideal
from benchmarks.kit.figures import round_figures
from benchmarks.kit.throughput_report import PROCESSES, report
from benchmarks.kit.whole_system import Api
from benchmarks.throughput import Bench, Prefill, Samples
from scheduler_service.core.config import CoreConfig

SHAPE = ideal.Shape(576, 30, 9, 3, 64, 1536, 49152, tied=True)


@pytest.fixture
def options(tmp_path):
    return throughput.parse(["--model", str(tmp_path), "--concurrency", "1", "64"])


def bench_of(options):
    """A benchmark of two rounds, as if it had run."""
    bench = Bench.__new__(Bench)
    bench.shape = SHAPE
    rates = {"vfmadd231ps zmm": 5e11, "vdpbf16ps zmm": 1e12, "vpdpbusd zmm": 2e12}
    bench.ceilings = [Ceilings(2, Rate(9e10, 9e10), {name: Rate(rate, rate) for name, rate in rates.items()})] * 2
    bench.samples = {}
    for number in options.concurrency:
        ideals = {name: [100.0, 200.0] for name in ("alone", *Api)}
        samples = Samples(ideals, [80.0, 150.0], [76.0, 150.0], [72.0, 120.0])
        for api in Api:
            samples.note_cpu(api, Counter(dict.fromkeys(PROCESSES, 0.1)), 50)
        bench.samples[number] = samples
    bench.prefill = Prefill([1.0, 1.0], [1.25, 2.0], [2.0, 2.0])
    return bench


def test_a_folder_is_taken_as_it_is(options, tmp_path):
    assert options.folder == str(tmp_path)


def test_the_pool_holds_the_largest_batch_and_the_long_prompt(options):
    settings = throughput.settings_for(options)
    config = CoreConfig(
        settings.block_size, settings.num_device_blocks, 0, settings.max_model_len, 64, settings.max_num_batched_tokens
    )
    free = (config.num_device_blocks - 1) * (1 - config.watermark)
    assert free >= 64 * (256 // settings.block_size + 1)
    assert config.max_tokens >= 1025


def test_ratios_are_of_the_same_round(options):
    told = throughput.summarize(bench_of(options), options)["requests"]["64"]
    assert told["share_of_ideal"]["generate"] == {"median": pytest.approx(0.755), "min": 0.75, "max": 0.76}
    assert told["system_over_alone"]["generate"] == {"median": pytest.approx(0.975), "min": 0.95, "max": 1.0}
    assert told["cpu_seconds_per_1000_tokens"]["stream"]["gateway"]["median"] == pytest.approx(2.0)


def test_ceilings_are_told_by_kind_and_by_instruction(options):
    told = throughput.summarize(bench_of(options), options)["ceilings"]
    assert told["num_threads"] == 2
    assert [told[name]["median"] for name in ("bandwidth", "float32", "bfloat16", "int8")] == [9e10, 5e11, 1e12, 2e12]
    assert told["instructions"]["vdpbf16ps zmm"]["max"] == 1e12


def test_the_share_of_a_long_prompt_is_of_its_time(options):
    told = throughput.summarize(bench_of(options), options)["prefill"]
    assert told["share_alone"] == {"median": pytest.approx(0.65), "min": 0.5, "max": 0.8}
    assert told["share_system"]["median"] == 0.5


def test_memory_is_told_beside_what_it_may_be(options):
    settings = throughput.settings_for(options)
    memory = throughput.summarize_memory(bench_of(options), settings, 10**9)
    assert memory["weights_bytes"] == 2 * SHAPE.num_weights
    assert memory["kv_pool_bytes"] == settings.num_device_blocks * 32 * 30 * 2 * 3 * 64 * 2
    assert memory["limit_bytes"] == 1.25 * (memory["weights_bytes"] + memory["kv_pool_bytes"]) + 300e6


def test_quantized_weights_keep_the_embedding(tmp_path):
    options = throughput.parse(["--model", str(tmp_path), "--quantization", "int8"])
    memory = throughput.summarize_memory(bench_of(options), throughput.settings_for(options), 1)
    assert memory["weights_bytes"] == SHAPE.num_weights + 2 * SHAPE.num_head_weights


def test_reports_everything(options):
    bench = bench_of(options)
    results = {
        "settings": {"model": "llama-135m", "dtype": "bfloat16", "quantization": "", "load": 0.1, "kernels": "k"},
        "workload": {"prompt_tokens": 128, "output_tokens": 128, "rounds": 2},
        "onednn": {"whole_layer": 4e11, "best_product": 5e11},
        **throughput.summarize(bench, options),
        "memory": throughput.summarize_memory(bench, throughput.settings_for(options), 10**9),
        "first_token_seconds": 3.21,
    }
    text = report(round_figures(results))
    assert "| 64 | 150 (100–200) | 115 (80–150) | 113 (76–150) | 96 (72–120) |" in text
    assert "| 1 | stream | 2.000 (2.000–2.000) |" in text
    assert "first token: 3.21 s" in text
    assert "90.0 GB/s; bfloat16 1000.0" in text
