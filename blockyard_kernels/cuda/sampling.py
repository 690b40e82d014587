"""The sampling ops on a GPU. See `blockyard_kernels.sampling`.

This module copies data between host and device: a choice takes one copy of its rows' parameters to the device, and only
functions that return numpy arrays wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.cuda.tokens import choice, last_tokens, logprobs, masks
from blockyard_kernels.launching import upload
from blockyard_kernels.sampling import Choices, Flags, Integers, TokenLogprobs

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


# The candidates of log probabilities that are computed at a time, and the bytes of memory per candidate.
MAX_CANDIDATES = 1 << 20
CANDIDATE_BYTES = 80


class CudaSampling:
    """See `blockyard_kernels.sampling.SamplingOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def finite_rows(self, logits: Tensor) -> Flags:
        return self.launch_finite_rows(logits).cpu().numpy()

    def launch_finite_rows(self, logits: Tensor) -> Tensor:
        """Like `finite_rows`, but leaves the flags on the device. A NaN makes a row's minimum and maximum NaN."""
        least, most = torch.aminmax(logits, dim=-1)
        return (least > float("-inf")) & (most < float("inf"))

    def apply_masks(self, logits: Tensor, rows: Integers, words: npt.NDArray[np.uint32]) -> None:
        if len(rows):
            masks.apply_masks(logits, upload(rows, self._device), upload(words.view(np.int32), self._device))

    def choose(self, logits: Tensor, choices: Choices) -> Integers:
        return self.launch_choose(logits, choices).cpu().numpy()

    def launch_choose(self, logits: Tensor, choices: Choices) -> Tensor:
        """Chooses on the device, after one copy of the parameters if any row is drawn."""
        drawn = choices.temperatures > 0
        if not drawn.any():
            return choice.choose(logits, None, drawn=False, filtered=False)
        filtered = drawn & ((choices.top_k > 0) | (choices.top_p < 1) | (choices.min_p > 0))
        table = upload(choice.pack_choices(choices), self._device)
        return choice.choose(logits, table, drawn=True, filtered=bool(filtered.any()))

    take_last_tokens = staticmethod(last_tokens.take_last_tokens)
    put_last_tokens = staticmethod(last_tokens.put_last_tokens)

    def token_logprobs(
        self, logits: Tensor, rows: Integers, token_ids: Integers | None, num_best: int
    ) -> TokenLogprobs:
        """Computes log probabilities of tokens of some rows, and of the best of each, in chunks of rows."""
        width = num_best + (token_ids is not None)
        candidates, values = np.empty((len(rows), width), np.int64), np.empty((len(rows), width), np.float32)
        ranks = np.empty(0 if token_ids is None else len(rows), np.int64)
        at_once = max(1, MAX_CANDIDATES // max(1, width))
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            given = None if token_ids is None else upload(token_ids[part], self._device)
            found = logprobs.token_logprobs(logits, upload(rows[part], self._device), given, num_best)
            candidates[part], values[part] = found[0].cpu().numpy(), found[1].cpu().numpy()
            if given is not None:
                ranks[part] = found[2].cpu().numpy()
        return TokenLogprobs(candidates, values, ranks)

    def choose_bytes(self, num_rows: int, vocab_size: int) -> int:
        mask_bytes = num_rows * (8 + -(-vocab_size // 32) * 4)
        return choice.memory_bytes(num_rows, vocab_size) + mask_bytes

    def token_logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        return CANDIDATE_BYTES * min(num_rows * (vocab_size + 1), max(MAX_CANDIDATES, vocab_size + 1))
