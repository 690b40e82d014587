"""A step's time by op: what its ops must read and compute adds up to what the ideal counts."""

from pathlib import Path

import pytest

from benchmarks.kernels import ceilings, phases
from benchmarks.kernels.phases import CONTEXT, Profile, Workload
from benchmarks.kit import ideal, models
from blockyard_kernels.cpu.library import Kind, Op

RECIPE = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)
BYTES = ideal.Machine(bandwidth=1.0, matrix_rate=1e30, attention_rate=1e30, weight_bytes=2, kv_bytes=2)
OPERATIONS = ideal.Machine(bandwidth=1e30, matrix_rate=1.0, attention_rate=1.0, weight_bytes=2, kv_bytes=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(RECIPE, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return Profile(folder, num_threads=1, max_sequences=3)


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings over less memory and time."""
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(phases, "CEILING_SECONDS", 0.01)


def ops_of(profile: Profile, workload: Workload) -> list[Op]:
    timed = profile.replay(workload.inputs(RECIPE.vocab_size))
    assert all(seconds > 0 for _, seconds in timed)
    return [op for op, _ in timed]


def test_a_decode_reads_and_computes_what_the_ideal_counts(folder: Path, profile: Profile) -> None:
    shape, workload = ideal.Shape.read(folder), Workload(3, 1, CONTEXT)
    needs = [phases.bytes_and_operations(op, shape, workload) for op in ops_of(profile, workload)]
    assert sum(num_bytes for num_bytes, _ in needs) == ideal.decode_seconds(shape, BYTES, 3, CONTEXT)
    assert sum(operations for _, operations in needs) == ideal.decode_seconds(shape, OPERATIONS, 3, CONTEXT)


def test_a_prompt_computes_what_the_ideal_counts_but_what_nobody_reads(folder: Path, profile: Profile) -> None:
    """After the last layer's attention, one row is left of a prompt's."""
    shape, workload = ideal.Shape.read(folder), Workload(1, 64, 64)
    needs = [phases.bytes_and_operations(op, shape, workload) for op in ops_of(profile, workload)]
    after_attention = sum(rows * columns for rows, columns in shape.layer_matrices[1:])
    least = sum(ideal.prompt_operations(shape, 64)) - 2 * 63 * after_attention
    assert sum(operations for _, operations in needs) == least


@pytest.mark.usefixtures("quick_ceilings")
def test_each_op_is_counted_once(folder: Path, profile: Profile) -> None:
    """Also the head, which has two phases."""
    shape, workload = ideal.Shape.read(folder), Workload(3, 1, CONTEXT)
    told = profile.measure(workload, 2)
    ops = ops_of(profile, workload)
    needs = [phases.bytes_and_operations(op, shape, workload) for op in ops]
    rates = [told["attention_rate" if op.kind == Kind.ATTENTION else "bfloat16_rate"] for op in ops]
    least = sum(
        max(size / told["bandwidth"], operations / rate) for (size, operations), rate in zip(needs, rates, strict=True)
    )
    shares = [op["milliseconds"] * op["share_of_ceiling"] for op in told["ops"].values()]
    assert sum(shares) == pytest.approx(1e3 * least)


@pytest.mark.usefixtures("quick_ceilings")
def test_a_report_names_each_op_once(profile: Profile) -> None:
    told = profile.measure(Workload(1, 1, CONTEXT), 2)
    assert {"attention", "head 32x320", "rms_norm"} <= set(told["ops"])
    assert told["milliseconds"] == pytest.approx(sum(op["milliseconds"] for op in told["ops"].values()))
    results = {"model": "tiny", "kernels": profile.kernels, "num_threads": 1, "steps": {"decode": told}}
    assert "attention" in phases.report(results)
