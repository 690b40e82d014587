"""What is compiled before the first step is all that steps launch: compiled for Hopper, where there is no GPU."""

from __future__ import annotations

from tests.kernels.triton.test_hopper import run

SCRIPT = """
import logging.handlers
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import torch
from blockyard_kernels.cuda import graphs, linear
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.warm_up import warm_up
from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.sampling import Choices
from tests.kernels.test_captured_ops import Network
from tests.kit.kernels.hopper import compiling
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import tiny_model

told = logging.handlers.BufferingHandler(100)
logging.getLogger("kernels").addHandler(told)
logging.getLogger("kernels").setLevel(logging.INFO)
torch.Tensor.new_empty = torch.Tensor.new_zeros  # what nothing writes is read as indexes
CPU = torch.device("cpu")
backend = CudaBackend(CPU, invariant=True)

with compiling(assembles=False) as compiled:
    runner = StepRunner.load(tiny_model("qwen3"), torch.bfloat16, backend, block_size=16)
    model = runner.model
    for each in model._linears():
        each.way = linear.Way(linear.Method.TILED)
    model.reserve_positions(64)

    def forward(token_ids, batch):
        return model.forward(token_ids, batch, runner.pool)

    ops = backend.lora
    for each in model._linears():
        if each is not model._ending.head:
            ops.make_room(each, 3, 16)
    sizes = CaptureSizes(60, 64, 16, None, 512, num_lora_slots=3)
    warm_up(backend, forward, model._ending.head, sizes)
    captured = graphs.CapturedSteps(forward, torch.clone, sizes, CPU, lambda work, pool: work())
    captured._find(captured._buckets.first()[0])
    known = {id(kernel) for kernel in compiled}

    def check(*what):
        late = {kernel.metadata.name for kernel in compiled if id(kernel) not in known}
        assert not late, (late, what)

    for new in ([1], [5], [7, 3, 1], [1] * 16, [1] * 33, [60]):
        tables = [[0] * (1 + len(new) % 3 + length // 16) for length in new]
        batch = backend.plan_attention(new, new, tables, 16, None)
        for lora in (None, LoraRows(np.arange(sum(new), dtype=np.int32) % 4 - 1)):
            token_ids = torch.zeros(sum(new), dtype=torch.int64)
            model.compute_logits(forward(token_ids, replace(batch, lora=lora))[:len(new)])
            check("a step", new, lora)
    for bucket in captured._buckets.first():
        captured._find(bucket)
        check(bucket)
    for rows in (1, 3, 4, 16):
        logits, zeros = torch.zeros(rows, model.config.vocab_size), np.zeros(rows, np.int64)
        ones = np.ones(rows, np.float32)
        for temperature, top_k, top_p, min_p in ((0, 0, 1, 0), (1, 0, 1, 0), (1, 5, 1, 0), (1, 0, .5, .1)):
            asked = temperature * ones, zeros + top_k, top_p * ones, min_p * ones, zeros, zeros, zeros
            token_ids = backend.sampling.launch_choose(logits, Choices(*asked))
            check("a choice", rows, asked)
        for given, num_best in ((zeros, 0), (zeros, 1), (zeros, 20), (None, 16)):
            backend.sampling.token_logprobs(logits, zeros, given, num_best)
            check("log probabilities", rows, num_best)
        backend.sampling.apply_masks(logits, zeros[:1], np.full((1, -(-logits.shape[1] // 32)), 2**32 - 1, np.uint32))
        check("masks", rows)
        table = torch.zeros(rows + 3, dtype=torch.int64)
        backend.sampling.put_last_tokens(table, 0 * token_ids, backend.sampling.take_last_tokens(table, table))
        check("last tokens", rows)

    # A network of all that Llama's lacks; what a library multiplies is not compiled.
    def library_product(rows, weight, *, wide):
        return torch.mm(rows, weight.T).to(torch.float32 if wide else rows.dtype)

    linear.library_product = library_product
    network = Network(SimpleNamespace(backend=CudaBackend(CPU), dtype=torch.bfloat16))

    def compute(token_ids, batch):
        return network.forward(token_ids, batch, network.pools[0])

    warm_up(network.kernels.backend, compute, network.head, CaptureSizes(60, 64, 16, None, 512))
    known |= {id(kernel) for kernel in compiled}
    for new in ([1], [5], [7, 3, 1], [1] * 16, [1] * 33, [60]):
        tables = [[0] * (1 + len(new) % 3 + length // 16) for length in new]
        batch = network.kernels.backend.plan_attention(new, new, tables, 16, None)
        hidden = compute(torch.zeros(sum(new), dtype=torch.int64), batch)
        network.kernels.backend.linear(hidden[: len(new)], network.head, wide=True)
        check("a step of all ops", new)
last = told.buffer[-1].getMessage()
assert last.startswith("warm-up ended: ") and ": 0 kernels compiled, 0 from" not in last, last
"""


def test_no_step_waits_for_a_compiler():
    run(SCRIPT)
