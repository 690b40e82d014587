"""The sizes of the input batch's rows, and the record of a row's progress. csrc/decode_loop.h mirrors the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from blockyard.model_config.pooling.rule import PoolingRule
    from worker_service.models.model_config import ModelConfig

PROGRESS = np.dtype(
    [
        # Known ids: prompt and output.
        ("num_tokens", np.int64),
        # Tokens whose KV exists.
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        # Whether a stop token was sampled or the row failed: such a row computes nothing more.
        ("ended", np.bool_),
    ],
    align=True,
)


@dataclass(slots=True)
class RowProgress:
    """The progress of one sequence: the fields of a record PROGRESS."""

    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_blocks: int = 0
    ended: bool = False

    def record(self) -> tuple[int, int, int, bool]:
        return self.num_tokens, self.num_computed_tokens, self.num_blocks, self.ended


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes of rows, and of the largest step."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    vocab_size: int
    max_num_batched_tokens: int
    # The keys that a query sees in each KV group; 0: all.
    kv_windows: tuple[int, ...] = (0,)
    rule: PoolingRule | None = None
    pooled_width: int = 0
    num_token_types: int = 0
    # The drafts that one sequence may have in a step, and all together.
    max_draft_tokens: int = 0
    max_draft_rows: int = 0
    whole_prompts: bool = False
    """Whether a prompt is computed in one step, whole."""
    num_state_blocks: int = 0
    """The fixed blocks of each sequence."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        kv_windows: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
        block_size: int,
        max_num_batched_tokens: int,
        drafts: tuple[int, int] = (0, 0),
        num_state_blocks: int = 0,
    ) -> BatchLimits:
        encoder = config.encoder
        return cls(
            max_model_len,
            max_num_seqs,
            block_size,
            config.vocab_size,
            max_num_batched_tokens,
            kv_windows,
            config.pooling,
            config.hidden_size,
            encoder.num_token_types if encoder else 0,
            *drafts,
            whole_prompts=encoder is not None,
            num_state_blocks=num_state_blocks,
        )

    @property
    def num_kv_groups(self) -> int:
        """The number of KV groups. A table has one block per group for every `block_size` tokens."""
        return len(self.kv_windows)

    @property
    def max_num_blocks(self) -> int:
        """The most blocks of one table: a full sequence's blocks, and one more per group that is allocated ahead."""
        return (-(-self.max_model_len // self.block_size) + 1) * self.num_kv_groups

    def count_slots(self, num_blocks: Any) -> Any:
        """Counts the tokens that tables of `num_blocks` blocks, a number or an array, have room for.

        Without KV groups a table has no blocks, and there is room for all tokens.
        """
        return num_blocks // self.num_kv_groups * self.block_size if self.kv_windows else self.max_model_len
