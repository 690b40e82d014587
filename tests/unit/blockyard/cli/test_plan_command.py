"""`blockyard plan` in its process, on machines and GPUs that are only named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.configuration import DeviceSettings
from blockyard.local.hardware import NAMED_GPUS, find_hardware, read_size
from blockyard.settings import SettingsError
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
# The shape of a model with 8 billion weights.
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
WEIGHTS_BYTES = 2 * 8_030_261_248


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return str(tmp_path)


def planned(capsys: Captured, *arguments: str, code: int) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert run("plan", *arguments, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_a_large_model_on_a_large_gpu(model: str, capsys: Captured) -> None:
    told = planned(capsys, model, "--gpu", "h100", code=0)
    assert told["model"]["num_parameters"] * 2 == WEIGHTS_BYTES
    assert told["plan"]["weights_bytes"] == [WEIGHTS_BYTES]
    assert told["plan"]["block_bytes"] == 16 * 32 * 2 * 8 * 128 * 2
    sequences = told["plan"]["num_sequences"]
    assert list(sequences) == ["1024", "4096", "16384", "65536", "131072"]
    assert sequences["4096"] == (told["plan"]["num_device_blocks"] - 1) // 256
    assert [each["tensor_parallel_size"] for each in told["parallel_sizes"]] == [1, 2, 4, 8]
    halves = told["parallel_sizes"][1]
    assert halves["weights_bytes"][0] == pytest.approx(WEIGHTS_BYTES / 2, rel=0.001)
    assert halves["num_sequences"]["65536"] > 2 * sequences["65536"]


def test_stages_hold_what_they_hold(model: str, capsys: Captured) -> None:
    told = planned(capsys, model, "--gpu", "l4", "--pipeline-parallel-size", "3", code=0)
    assert len(told["plan"]["weights_bytes"]) == 3
    assert sum(told["plan"]["weights_bytes"]) == WEIGHTS_BYTES


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--gpu", "t4"], "Tesla T4 has compute capability 7.5: use float16"),
        (
            ["--gpu", "t4", "--dtype", "float16"],
            "the weights take 15.0 GiB in float16, and 14.5 GiB of memory are free",
        ),
        (["--memory", "64GiB", "--quantization", "fp8"], "fp8 needs a GPU with our kernels; this is bfloat16 on cpu"),
        (["--memory", "22GiB", "--max-model-len", "100000"], "--max-model-len 100000 is above the"),
        (["--memory", "64GiB", "--max-model-len", "200000"], "is above the 131072 tokens of the model"),
        (["--memory", "64GiB", "--block-size", "7"], "block_size: must be one of 8"),
    ],
)
def test_what_would_be_refused_is_told(model: str, flags: list[str], why: str, capsys: Captured) -> None:
    assert why in planned(capsys, model, *flags, code=1)["refusal"]
    assert run("plan", model, *flags) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "would be refused: " in told
    assert why in told


def test_replicas_share_a_memory(model: str, capsys: Captured) -> None:
    one = planned(capsys, model, "--memory", "64GiB", code=0)["plan"]
    two = planned(capsys, model, "--memory", "64GiB", "--data-parallel-size", "2", code=0)["plan"]
    assert two["cache_bytes"] < one["cache_bytes"] / 2


def test_a_table_for_people(model: str, capsys: Captured) -> None:
    assert run("plan", model, "--memory", "64GiB") == 0
    out = capsys.readouterr().out
    for text in ("8.03 billion parameters", "15.0 GiB at each worker", "4.0 MiB a block of 32 tokens", "131072"):
        assert text in out


def test_the_demo_model_fits(capsys: Captured) -> None:
    assert run("plan", "--memory", "2GiB") == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_this_machine_is_read() -> None:
    found = find_hardware(DeviceSettings(device="cpu"))
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.num_threads > 0
    assert not found.has_gpu


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("24", 24 << 30), ("0.5 gib", 1 << 29), ("512MiB", 512 << 20), ("8GB", 8 * 10**9)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "7 apples"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not a size"):
        read_size(text)


def test_a_gpu_that_is_not_known_is_refused(capsys: Captured) -> None:
    assert run("plan", "--gpu", "h9000") == 1
    assert ", ".join(NAMED_GPUS) in capsys.readouterr().err
