"""A causal language model of transformers, split into its body, which computes rows, and its head for logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from worker_service.models.fallback.attention import Site, StepAttention, attending
from worker_service.models.fallback.foreign_ops import ForeignOp, ForeignOps
from worker_service.models.fallback.functions import ExactFunctions, compute_inside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.ops import AttentionBatch, Backend
    from worker_service.models.fallback.packing import Packer


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
