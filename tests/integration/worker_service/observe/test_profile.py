"""What a profile promises on a CPU: that no step takes more memory, whatever it computes and samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from blockyard.capacity.steps import SamplingScratch
from blockyard_kernels.reference.sampling import MAX_CHOSEN_LOGITS, ReferenceSampling
from tests.kit.kernels.backends import build_kernels
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.models.loader import load_model
from worker_service.runner.dry_runs import profile
from worker_service.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
NUM_TOKENS, NUM_SEQUENCES = 3000, 24

# A process of its own: what others have freed before would hide what is taken.
MEASURE = """
import sys
from pathlib import Path
import numpy as np, torch
from blockyard_kernels.capture import CaptureSizes, StepInputs
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.device.memory import read_peak_memory, reset_peak_memory
from worker_service.models.loader import load_model
from worker_service.runner.dry_runs import dry_step, profile, warm_up
from worker_service.runner.model_runner import ModelRunner
from worker_service.sampling.sampler import worst_rows

folder, quantization, num_tokens, num_sequences = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loaded = load_model(Path(folder), torch.bfloat16, torch.device("cpu"), lambda done, total: None, "auto", quantization)
runner = ModelRunner(loaded)
promised = profile(runner, 32, num_tokens, num_sequences)
pool = allocate_pool(BlockFormat.of(loaded.model, 32), 1, torch.device("cpu"))
runner.capture(pool, CaptureSizes(num_tokens, num_sequences, 32))
warm_up(runner, pool, 32, num_sequences)
pool.fill_(0)
assert reset_peak_memory()
before = read_peak_memory()
if runner.captured is not None:
    lengths = np.diff(np.arange(num_sequences + 1) * num_tokens // num_sequences)
    tables = np.zeros((num_sequences, -(-int(lengths.max()) // 32)), np.int32)
    last = np.cumsum(lengths) - 1
    step = StepInputs(lengths, lengths, tables, np.zeros(num_tokens, np.int64), last)
    with torch.inference_mode():
        outputs = runner.captured.replay(step, with_logits=True)
        runner.chooser.sampler.sample(outputs.logits, worst_rows(num_sequences, loaded.config.vocab_size))
    del outputs
rows = min(runner.max_prompt_rows, num_tokens)
dry_step(runner, pool, 32, num_sequences=num_sequences, num_tokens=num_tokens, num_prompt_rows=rows)
print(promised, read_peak_memory() - before)
"""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and rows as wide as those of a model that is a hundred times as large."""
    folder = tmp_path_factory.mktemp("wide")
    hidden, inner, vocab, heads = 512, 2048, 60_000, 8
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    fields |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "vocab_size": vocab}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    fields |= {"tie_word_embeddings": True, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    tensors = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    made = {name: torch.rand(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
    save_file(made, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_no_step_takes_more_than_was_promised(wide_model: Path, quantization: str) -> None:
    build_kernels()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(wide_model), quantization, str(NUM_TOKENS), str(NUM_SEQUENCES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "the CPU kernels serve"
    promised, taken = map(int, done.stdout.split())
    assert taken > 30 * MIB, "the steps were large"
    assert taken <= promised + 8 * MIB
    assert promised < 3 * taken, "and the promise is not far from the truth"


def test_a_profile_tells_the_same_each_time() -> None:
    build_kernels()
    runner = ModelRunner(load_model(tiny_model("llama"), torch.bfloat16, torch.device("cpu"), lambda done, total: None))
    told = {profile(runner, 32, 1024, 8) for _ in range(3)}
    assert len(told) == 1
    assert profile(runner, 32, 2048, 8) > max(told)
    assert profile(runner, 32, 1024, 1024) > max(told)


def test_choosing_takes_its_memory_for_some_rows_at_a_time() -> None:
    ops, vocab_size = ReferenceSampling(torch.device("cpu")), 100_000
    scratch = SamplingScratch(ops.choose_bytes, ops.token_logprobs_bytes)
    for_all = scratch.sampling_bytes(MAX_CHOSEN_LOGITS // vocab_size, vocab_size)
    assert scratch.sampling_bytes(1000, vocab_size) < for_all + 4 * 1000 * vocab_size * 4
    assert ops.choose_bytes(1, 10 * MAX_CHOSEN_LOGITS) == 12 * 4 * 10 * MAX_CHOSEN_LOGITS, "one row at least"
