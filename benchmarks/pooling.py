"""How fast a worker makes vectors: beside its network alone, the network's products alone, and ONNX Runtime.

    python benchmarks/pooling.py [--dtype bfloat16] [--num-inputs 16] [--num-tokens 128] [--rounds 9] [--write]

The model has the shape of all-MiniLM-L6-v2 (22 million weights: 6 layers of 384) and random weights. Each round
computes the same inputs in each way, one way after another: a worker's step from its message to its answer's bytes; the
network's ops alone; its products alone, which is what bounds both; and, where the packages onnxruntime, onnx and
onnxscript are (they are in no extra), ONNX Runtime in float32, which is what fastembed runs, with the mean of its rows.
Ratios are of the same round. On a machine that does other work, `--clock processor` with one thread counts the
processor's seconds instead of those on the wall.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import transformers

from benchmarks.kit import record
from benchmarks.kit.figures import number, percent, round_figures, spread_of
from blockyard.common.v1 import pooling_pb2
from blockyard.worker.v1 import worker_pb2 as pb
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.codec import decode_step, encode_result
from worker_service.models.loader import load_model
from worker_service.runner.pooling_runner import make_runner
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.models.loader import RunnableModel

BLOCK_SIZE = 32
MINILM = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


def make_model(folder: Path) -> transformers.PreTrainedModel:
    """Writes the model as sentence-transformers would."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**MINILM), add_pooling_layer=False).eval()
    model.save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": f"a.{name}"} for path, name in modules]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    return model


class WorkerSteps:
    """A worker's steps, each with all inputs."""

    def __init__(self, loaded: RunnableModel, inputs: np.ndarray) -> None:
        self._inputs, self._loaded = inputs, loaded
        num_inputs, self._num_tokens = inputs.shape
        blocks = -(-self._num_tokens // BLOCK_SIZE)
        self.tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(num_inputs)]
        cache = CacheEngine(BlockFormat.of(loaded.model, BLOCK_SIZE), num_inputs * blocks + 1, 0, loaded.backend)
        limits = BatchLimits.of(loaded.config, loaded.model.kv_groups.windows, 512, num_inputs, BLOCK_SIZE, inputs.size)
        runner = make_runner(loaded)
        assert runner.prove_batch_invariance()
        self.pool = cache.device_pool
        self._executor = StepExecutor(InputBatch(limits), cache, runner)
        self._executor.begin_epoch(1)
        self._num_steps = 0
        sizes = {packed.in_features for layer in loaded.model.layers for packed in layer.linears}
        self._rows = {size: torch.ones(inputs.size, size, dtype=loaded.config.dtype) for size in sizes}

    def message(self) -> bytes:
        """Makes the next step's message."""
        self._num_steps += 1
        first = self._num_steps * len(self._inputs)
        ids = range(first, first + len(self._inputs))
        message = pb.ExecuteModelRequest(
            epoch=1,
            step_id=self._num_steps,
            sequence_ids=ids,
            num_new_tokens=[self._num_tokens] * len(ids),
            finished_sequence_ids=range(first - len(ids), first),
        )
        pooling = pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_MEAN, normalise=True).SerializeToString()
        for sequence_id, token_ids, table in zip(ids, self._inputs.tolist(), self.tables, strict=True):
            new = message.new_sequences.add(sequence_id=sequence_id, token_ids=token_ids, block_ids=table)
            new.prompt_length = len(token_ids)
            new.pooling_params = pooling
        return message.SerializeToString()

    def run(self, message: bytes) -> np.ndarray:
        """Computes a step, from its message to its answer's bytes."""
        step = decode_step(pb.ExecuteModelRequest.FromString(message))
        answer = encode_result(self._executor.execute(step, time.perf_counter()))
        answer.SerializeToString()
        assert not answer.HasField("refusal"), answer.refusal
        return np.frombuffer(answer.pooled_values, "<f4").reshape(len(self._inputs), -1)

    @torch.inference_mode()
    def run_network(self) -> None:
        """Computes the network's ops of such a step."""
        lengths = [self._num_tokens] * len(self._inputs)
        batch = self._loaded.backend.plan_attention(lengths, lengths, self.tables, BLOCK_SIZE)
        self._loaded.model.forward(torch.from_numpy(self._inputs.ravel()), batch, self.pool)

    @torch.inference_mode()
    def run_products(self) -> None:
        """Computes the network's products of such a step."""
        for layer in self._loaded.model.layers:
            for packed in layer.linears:
                self._loaded.backend.linear(self._rows[packed.in_features], packed)


def make_onnx(model: transformers.PreTrainedModel, folder: Path, inputs: np.ndarray) -> Callable[[], np.ndarray]:
    """Exports the network, and returns what computes the vectors by it."""
    import onnxruntime  # noqa: PLC0415  in no extra

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.from_numpy(inputs)
    path = folder / "model.onnx"
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(Rows().eval(), (ids, torch.ones_like(ids)), path, input_names=names, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = dict(zip([each.name for each in session.get_inputs()], (inputs, np.ones_like(inputs)), strict=False))

    def run() -> np.ndarray:
        vectors = session.run(None, given)[0].mean(1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds."""
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    inputs = np.random.default_rng(1).integers(1000, 30000, (options.num_inputs, options.num_tokens))
    torch.set_num_threads(options.num_threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        dtype, device = getattr(torch, options.dtype), torch.device("cpu")
        loaded = load_model(folder, dtype, device, lambda done_bytes, total_bytes: None, options.cpu_kernels)
        worker = WorkerSteps(loaded, inputs)
        ways: dict[str, Callable[[], Any]] = {"network": worker.run_network, "products": worker.run_products}
        if importlib.util.find_spec("onnxruntime"):
            ways["onnxruntime"] = make_onnx(model, folder, inputs)
            gap = np.abs(ways["onnxruntime"]() - worker.run(worker.message())).max()
            assert gap < (1e-5 if dtype is torch.float32 else 1e-2), gap
        seconds: dict[str, list[float]] = {way: [] for way in ("worker", *ways)}
        for index in range(-2, options.rounds):
            message = worker.message()
            for way, run in {"worker": lambda: worker.run(message), **ways}.items():  # noqa: B023  called here
                begin = clock()
                run()
                if index >= 0:
                    seconds[way].append(clock() - begin)
    return {
        "settings": vars(options) | {"kernels": loaded.backend.name},
        "tokens_per_second": {way: spread_of([inputs.size / each for each in times]) for way, times in seconds.items()},
        "worker_per": {way: spread_of(seconds[way], seconds["worker"]) for way in ways},
    }


def main() -> None:
    """Measures, shows, and keeps it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--cpu-kernels", default="auto")
    parser.add_argument("--num-inputs", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = measure(options)
    for way, rate in results["tokens_per_second"].items():
        print(f"{way:12} {number(rate)} tokens/s")
    for way, ratio in results["worker_per"].items():
        print(f"worker against {way}: {percent(ratio)}")
    if options.write:
        del results["settings"]["write"]
        record.append("pooling", round_figures(results), options.cpu_kernels)


if __name__ == "__main__":
    main()
