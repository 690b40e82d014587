"""A network's step, recorded once and replayed: what goes in and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from kernels.lora import LoraRows


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of a captured step: arrays as for `Backend.plan_attention`, within the captured sizes."""

    num_new_tokens: npt.NDArray[np.int64]
    """[S], contiguous."""
    seq_lens: npt.NDArray[np.int64]
    """[S], contiguous."""
    block_tables: npt.NDArray[np.int32]
    """[groups * S, widest], its rows contiguous: those of the first KV group, then those of the others."""
    token_ids: npt.NDArray[np.int64]
    """[T]: -1 - row in place of an id that the device alone knows, the last token of a row of `last_tokens`."""
    chosen: npt.NDArray[np.int64]
    """[R]: rows of which logits are made, in any order and also more than once."""
    last_tokens: Tensor | None = None
    """[rows] int64 on the device, as for `SamplingOps.take_last_tokens`; None where all ids are known."""
    lora: LoraRows | None = None
    """The rows that have a LoRA adapter; None: none has."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """The results of a captured step for its chosen rows: logits, or the best token of each, or both."""

    best: npt.NDArray[np.int64] | None
    """[R]: the likeliest token, the lowest id on ties; of no meaning where the logits are not finite."""
    best_values: npt.NDArray[np.float32] | None
    """[R]: its logit."""
    finite: npt.NDArray[np.bool_] | None
    """[R]: whether all logits are finite numbers."""
    logits: Tensor | None
    """[R, vocabulary] float32, if they were wanted or there is no `best`; the next step may overwrite them."""


class CapturedStep(Protocol):
    """A network's step, recorded once and replayed without its Python."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its own buffers, once the largest step has run."""
        ...

    def takes(self, step: StepInputs) -> bool:
        """Returns whether the step is within the sizes that this was made for."""
        ...

    def replay(self, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        """Computes a step, with the bits of its ops called one by one."""
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
    """Groups of layers that have block tables of their own: the network knows."""
    is_trial: bool = False
    """Whether nothing will be replayed, and only `CapturedStep.num_bytes` is wanted."""
