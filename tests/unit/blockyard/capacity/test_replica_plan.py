"""What a replica is planned to hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from blockyard.capacity.replica_plan import Hardware, plan_replica
from blockyard.configuration import SystemConfiguration
from blockyard.contract.parallel import ParallelSizes
from blockyard.model_config.network import read_network
from blockyard.settings import resolve

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
HOST = Hardware("a processor", 16 * GIB, 15 * GIB, num_devices=0, num_threads=2)
VOCAB_SIZE, MAX_NUM_SEQS = 100_000, 256


def planned_step_bytes(folder: Path, cpu_kernels: str) -> int:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    settings = {"device": "cpu", "cpu_kernels": cpu_kernels, "max_num_seqs": MAX_NUM_SEQS}
    configuration = resolve(SystemConfiguration, settings, environment={})
    planned = plan_replica(read_network(folder), configuration, HOST, ParallelSizes())
    assert not planned.refusal
    return planned.tightest.memory.activation_bytes


def test_torchs_own_kernels_sort_whole_rows_of_logits_on_a_processor_too(tmp_path: Path) -> None:
    """A worker found a third fewer blocks than were planned with the scratch of the other kernels."""
    more = planned_step_bytes(tmp_path, "reference") - planned_step_bytes(tmp_path, "auto")
    assert more > MAX_NUM_SEQS * VOCAB_SIZE * 4, "at least a copy of all logits"
