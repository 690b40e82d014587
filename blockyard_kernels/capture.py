"""The captured step of a network, which is recorded once and replayed, with its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.decoding import DecodeLoop
    from blockyard_kernels.lora import LoraRows


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of a captured step: arrays as for `Backend.plan_attention`, within the captured sizes."""

    num_new_tokens: npt.NDArray[np.int64]
    """[S], contiguous."""
    seq_lens: npt.NDArray[np.int64]
    """[S], contiguous."""
    block_tables: npt.NDArray[np.int32]
    """[groups * S, widest], its rows contiguous: the tables of the first KV group, then those of the other groups."""
    token_ids: npt.NDArray[np.int64]
    """[T]: token ids; -1 - row stands for the last token of this row of `last_tokens`, which only the device knows."""
    chosen: npt.NDArray[np.int64]
    """[R]: indices of the rows whose logits are computed, in any order and possibly repeated."""
    last_tokens: Tensor | None = None
    """[rows] int64 on the device, as for `SamplingOps.take_last_tokens`; None if the host knows all ids."""
    lora: LoraRows | None = None
    """The LoRA slots of the rows; None: no row has an adapter."""
    fixed_tables: npt.NDArray[np.int32] | None = None
    """[S, fixed blocks of a sequence], its rows contiguous; None: sequences have none."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """The results of a captured step for its chosen rows: logits, or the best token of each, or both."""

    best: npt.NDArray[np.int64] | None
    """[R]: the likeliest token, the lowest id on ties; arbitrary if the logits are not finite."""
    best_values: npt.NDArray[np.float32] | None
    """[R]: the logit of the likeliest token."""
    finite: npt.NDArray[np.bool_] | None
    """[R]: whether all logits are finite numbers."""
    logits: Tensor | None
    """[R, vocabulary] float32, if they were requested or there is no `best`; the next step may overwrite them."""


class CapturedStep(Protocol):
    """A network's step, recorded once and replayed without its Python."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its own buffers, once the largest step has run."""
        ...

    def decode_loop(self) -> DecodeLoop | None:
        """Makes a loop that replays it without Python; None: it cannot be."""
        ...

    def takes(self, step: StepInputs) -> bool:
        """Returns whether the step is within the sizes that this was made for."""
        ...

    def replay(self, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        """Computes a step. The results have the same bits as if its ops were called one by one."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """The largest step that is captured."""

    max_num_tokens: int
    max_num_seqs: int
    block_size: int
    sliding_window: int | None = None
    max_length: int = 0
    """The longest sequence in tokens; needed where memory for block tables is reserved."""
    num_lora_slots: int = 0
    """The number of LoRA slots; 0: no step has adapters."""
    num_kv_groups: int = 1
    """The number of groups of layers, each of which has its own block tables."""
    is_trial: bool = False
    """Whether the capture only serves to measure `CapturedStep.num_bytes` and is never replayed."""
