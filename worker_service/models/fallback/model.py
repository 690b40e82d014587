"""A network that transformers' code computes, with the interface that the worker needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockyard.contract.parallel import ALONE
from blockyard.model_config.kv_groups import KvGroups
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.share import Share
from blockyard.telemetry import EventLogger
from worker_service.models.decoder import DecoderModel
from worker_service.models.description import Module, OtherModule
from worker_service.models.fallback.attention import Site, StepAttention, attending
from worker_service.models.fallback.checks import BatchChecks
from worker_service.models.fallback.functions import ExactFunctions, ForeignOp, ForeignOps, compute_inside
from worker_service.models.fallback.packing import ExactNorm, Packer
from worker_service.models.projections import ModuleNames, ProjectionRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.capture import CapturedStep, CaptureSizes
    from kernels.ops import AttentionBatch, Backend
    from kernels.packed import PackedLinear
    from worker_service.models.fallback.survey import Survey
    from worker_service.models.model_config import ModelConfig


log = EventLogger(__name__)


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
