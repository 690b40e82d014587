"""A network that transformers' code computes, with the interface that the worker needs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockyard.contract.parallel import ALONE
from blockyard.model_config.kv_groups import KvGroups
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.share import Share
from blockyard.telemetry import EventLogger
from blockyard_kernels.ops import AttentionBatch, Backend, kv_pool_shape
from worker_service.models.decoder import DecoderModel
from worker_service.models.description import Module, OtherModule
from worker_service.models.fallback.attention import Site, StepAttention, attending
from worker_service.models.fallback.functions import ExactFunctions, ForeignOp, ForeignOps, compute_inside
from worker_service.models.fallback.packing import ExactNorm, Packer
from worker_service.models.projections import ModuleNames, ProjectionRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.packed import PackedLinear
    from worker_service.models.fallback.survey import Survey
    from worker_service.models.model_config import ModelConfig

    Compute = Callable[[Tensor, AttentionBatch, Tensor], Tensor]

log = EventLogger(__name__)

LENGTHS = (19, 33, 52, 70)

PIECES = (3, 7, 11, 16)

NUM_DECODED = 6

BLOCK_SIZE = 16

Work = list[tuple[int, int, int]]

"""The work of a step: (index of a sequence, first token, end)."""


class BatchChecks:
    """Four sequences of random tokens, and the pool of their KV."""

    def __init__(
        self, backend: Backend, vocab_size: int, max_length: int, format_: tuple[int, int, int, torch.dtype]
    ) -> None:
        """`format_`: the number of layers, the number of KV heads, head_dim, and the dtype of the pool."""
        layers, heads, head_dim, dtype = format_
        chooser = random.Random(4)
        lengths = [min(length, max_length) for length in LENGTHS]
        self.sequences = [
            torch.tensor([chooser.randrange(vocab_size) for _ in range(length)], device=backend.device)
            for length in lengths
        ]
        places, self._tables = iter(range(sum(-(-length // BLOCK_SIZE) for length in lengths))), list[list[int]]()
        for length in lengths:
            self._tables.append([next(places) for _ in range(-(-length // BLOCK_SIZE))])
        num_blocks = sum(map(len, self._tables))
        shape = kv_pool_shape(num_blocks, layers, heads, BLOCK_SIZE, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=backend.device)
        self._backend = backend

    def step(self, work: Work, window: int | None) -> tuple[Tensor, AttentionBatch]:
        counts, ends = [end - start for _, start, end in work], [end for _, _, end in work]
        tables = [self._tables[index] for index, _, _ in work]
        batch = self._backend.plan_attention(counts, ends, tables, BLOCK_SIZE, window)
        return torch.cat([self.sequences[index][start:end] for index, start, end in work]), batch

    def first_difference(self, compute: Compute, window: int | None) -> str:
        """Returns the first schedule under which a row differs from the same row computed alone; empty: none."""
        whole = self._run(list(self._alone()), compute, window)
        for name, steps in self._schedules():
            got = self._run(steps, compute, window)
            if not all(torch.equal(rows, whole[index]) for index, rows in got.items()):
                return name
        return ""

    def _run(self, steps: Sequence[Work], compute: Compute, window: int | None) -> dict[int, Tensor]:
        rows: dict[int, list[Tensor]] = {}
        for work in steps:
            parts = compute(*self.step(work, window), self.pool).split([end - start for _, start, end in work])
            for (index, _, _), part in zip(work, parts, strict=True):
                rows.setdefault(index, []).append(part)
        return {index: torch.cat(parts) for index, parts in rows.items()}

    def _alone(self) -> Iterator[Work]:
        for index, sequence in enumerate(self.sequences):
            yield [(index, 0, len(sequence))]

    def _schedules(self) -> Iterator[tuple[str, list[Work]]]:
        whole = [piece for (piece,) in self._alone()]
        yield "together", [whole]
        yield "in pieces", _cut([(index, 0, end, PIECES[index]) for index, _, end in whole])
        prompts = [(index, 0, max(1, end - NUM_DECODED)) for index, _, end in whole]
        decodes = _cut([(index, first, end, 1) for (index, _, first), (_, _, end) in zip(prompts, whole, strict=True)])
        yield "decoded", [prompts, *decodes]
        index, _, end = whole[-1]
        yield "in pieces alone", _cut([(index, 0, end, PIECES[1])])


def _cut(sequences: Sequence[tuple[int, int, int, int]]) -> list[Work]:
    """Cuts (index, first token, end, length of a piece) into steps; each step has the next piece of every sequence."""
    steps: list[Work] = []
    for index, start, end, length in sequences:
        for number, first in enumerate(range(start, end, length)):
            if number == len(steps):
                steps.append([])
            steps[number].append((index, first, min(first + length, end)))
    return steps


class Network:
    """A network whose products are packed."""

    def __init__(self, model: Any, sites: Mapping[str, Site], packer: Packer) -> None:
        self.model = model
        self.packer = packer
        self._body: Any = model.base_model
        self._sites: dict[nn.Module, Site] = {model.get_submodule(name): site for name, site in sites.items()}
        # Rows that the body returns instead of its own, while only the head is computed.
        self._given: Tensor | None = None
        self._output_type: Any = None
        compute_body = self._body.forward

        def forward_body(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return self._output_type(last_hidden_state=self._given)
            output = compute_body(*args, **kwargs)
            self._output_type = type(output)
            return output

        self._body.forward = forward_body

    def compute_hidden(self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor, backend: Backend) -> Tensor:
        """Computes a step: from tokens [T] to the rows [T, hidden_size] that the head reads."""
        step = StepAttention(backend, batch, kv_pool, self._sites)
        with attending(step):
            output = self._body(input_ids=token_ids[None], position_ids=batch.positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits [R, vocab_size] float32 of rows [R, hidden_size]. Call `compute_hidden` once before."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._given = hidden[None]
        try:
            return self.model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self._given = None

    def replace_functions(self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor) -> list[ForeignOp]:
        """Replaces functions that modules call by our ops; returns the remaining calls that may depend on the batch.

        `token_ids` and `batch` are a step that is computed to find the calls.
        """
        found = self._find_foreign(token_ids, batch, kv_pool)
        if not found:
            return []
        mode = ExactFunctions(self.packer, dict(self.model.named_parameters()))
        for module in {op.module: None for op in found}:
            compute_inside(module, mode)
        return self._find_foreign(token_ids, batch, kv_pool)

    def _find_foreign(self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor) -> list[ForeignOp]:
        names = {module: name or type(module).__name__ for name, module in self.model.named_modules()}
        # The first run is not recorded: it also initialises things that later steps reuse.
        self.compute_logits(self.compute_hidden(token_ids, batch, kv_pool, self.packer.backend))
        with ForeignOps(names) as looking:
            self.compute_logits(self.compute_hidden(token_ids, batch, kv_pool, self.packer.backend))
        return looking.found


class TransformersModel(DecoderModel):
    """See `DecoderModel`: whole, on one device, and op by op."""

    def __init__(self, config: ModelConfig, network: Network, survey: Survey, code: str) -> None:
        """`code`: the name of the code that computes it, see `DecoderModel.foreign_code`."""
        share = Share.of(config, ALONE)
        super().__init__(
            config, network.packer.backend, None, (), None, share, ModuleNames(LLAMA_NAMES, "model.", "lm_head")
        )
        # Transformers' layers see all tokens of a sequence, so no KV group drops tokens.
        self.kv_groups = KvGroups.keep_all(config.num_layers)
        self.foreign_code = code
        self._network = network
        self._shapes = dict.fromkeys(site.shape for site in survey.sites.values())
        pool = len(survey.sites), config.num_kv_heads, config.head_dim, config.dtype
        self.checks = BatchChecks(self._backend, config.vocab_size, config.max_model_len, pool)
        # In inference mode torch does not decompose some ops.
        with torch.no_grad():
            work = [(0, 0, len(self.checks.sequences[0])), (1, 0, 1)]
            self.foreign_ops = network.replace_functions(
                *self.checks.step(work, config.sliding_window), self.checks.pool
            )

    @property
    def parameter_bytes(self) -> int:
        return sum(module.num_bytes for module in self.modules())

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """Computes one step: see `DecoderModel.forward`."""
        with torch.inference_mode():
            return self._network.compute_hidden(token_ids, batch, kv_pool, self._backend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits [R, vocab_size] float32 of rows [R, hidden_size]."""
        with torch.inference_mode():
            return self._network.compute_logits(hidden)

    def capture(self, kv_pool: Tensor, sizes: CaptureSizes) -> CapturedStep | None:
        """Records nothing: there is Python between the ops."""
        return None

    def probe(self) -> bool:
        """Returns whether results are independent of the batch: all ops are ours, and the checks find no difference.

        Any foreign op that may depend on the batch gives False, since the short checks may miss its effect.
        """
        # Each probe may change the method of its shape.
        found = [self._backend.probe(self._linears(), shape) for shape in self._shapes]
        difference = self.checks.first_difference(self.compute, self.config.sliding_window)
        if self.foreign_ops or difference:
            log.warning(
                "transformers' code for this model is not exact: results depend on what runs beside them",
                architecture=self.config.architecture,
                op=str(self.foreign_ops[0]) if self.foreign_ops else None,
                num_ops=len(self.foreign_ops),
                differs=difference or None,
            )
        return all(found) and not self.foreign_ops and not difference

    def compute(self, token_ids: Tensor, batch: AttentionBatch, kv_pool: Tensor) -> Tensor:
        """Computes the logits [T, vocab_size] of all rows of a step."""
        return self.compute_logits(self.forward(token_ids, batch, kv_pool))

    def modules(self) -> list[Module | OtherModule]:
        """Lists packed weights, then the tensors that transformers' code holds."""
        packed = [_module(name, "Linear", weight) for name, weight in self._network.packer.packed.items()]
        model = self._network.model
        held = [_module(name, "Tensor", tensor.detach()) for name, tensor in model.named_parameters()]
        norms = [
            _module(f"{name}.weight", "Norm", module.weight)
            for name, module in model.named_modules()
            if isinstance(module, ExactNorm)
        ]
        return [*packed, *held, *norms]

    def _linears(self) -> list[PackedLinear]:
        return list(self._network.packer.packed.values())


def _module(name: str, kind: str, weight: Tensor | PackedLinear) -> Module:
    if isinstance(weight, torch.Tensor):
        shape = weight.shape[0] if weight.dim() else 1, weight[0].numel() if weight.dim() and len(weight) else 1
        return Module(name, kind, weight, (ProjectionRows(name.removesuffix(".weight"), *shape),))
    return Module(name, kind, weight, (ProjectionRows(name, weight.out_features, weight.in_features),))
