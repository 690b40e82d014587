"""A scheduler's configuration: its limits, its KV groups, its room for more requests, and the errors of both."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.contract.workers import count_decoded_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import GroupSpec


class NeverFits(Exception):
    """A request that could not run even alone. `num_tokens_that_fit`: the most tokens, prompt and output together."""

    def __init__(self, num_tokens: int, num_tokens_that_fit: int) -> None:
        super().__init__(
            f"the request never fits: {num_tokens} tokens are more than the {num_tokens_that_fit} that a worker holds"
        )
        self.num_tokens_that_fit = num_tokens_that_fit


class StepMismatch(Exception):
    """An answer that cannot be that of the oldest step in flight: scheduler or worker has a bug."""


@dataclass(frozen=True, slots=True)
class KvBlockGroups:
    """The KV groups of a model: layers that keep the same tokens, and have one block for each `block_size` tokens.

    A block table has a place for each group and each block of tokens, those of one block of tokens side by side: place
    p belongs to group `p % num_groups`. A group with a window keeps no more than its queries will see.

    `windows`: for each group how many keys a query sees, its own among them; 0: all.

    `num_ahead`: for how many blocks of tokens a prefill has blocks in groups with windows, from the first one that a
    window still sees. A decode never needs more.

    `num_state_blocks`: the fixed blocks that a sequence has besides, whatever its length. A model without attention has
    no group.
    """

    block_size: int
    windows: tuple[int, ...] = (0,)
    num_ahead: int = 0
    num_state_blocks: int = 0

    @property
    def num_groups(self) -> int:
        """Number of groups, and so of blocks for each `block_size` tokens."""
        return len(self.windows)

    @property
    def widest(self) -> int:
        """The widest window; 0: no group has one."""
        return max(self.windows, default=0)

    def count_full(self, block_ids: Sized) -> int:
        """Counts the blocks of tokens that a table, or a part of one from its beginning, has in all groups."""
        return len(block_ids) // self.num_groups if self.windows else 0

    def count_slots(self, num_places: int) -> int:
        """Counts the tokens that a table of `num_places` places has room for: any number, if there is no group."""
        return num_places // self.num_groups * self.block_size if self.windows else sys.maxsize

    def first_kept(self, window: int, num_full: int) -> int:
        """Returns the first block of tokens that a window still sees when `num_full` are full and computed.

        The next query, and each one in flight, is at position `num_full * block_size` or later.
        """
        return max(0, (num_full * self.block_size - window + 1) // self.block_size) if window else 0

    def count_ready(self, num_found: int, num_full: int, num_blocks: int) -> int:
        """Returns for how many of `num_blocks` blocks of tokens a prefill has blocks in all groups.

        `num_found`: blocks of tokens that were cached on admission. They may be shared, so that releasing them frees
        nothing. For each of the others that a prefill releases it gets one ahead, so that it never runs out.
        """
        if not self.widest:
            return num_blocks
        return min(num_blocks, max(num_found, self.first_kept(self.widest, num_full)) + self.num_ahead)

    def count_blocks(self, num_tokens: int) -> int:
        """Counts the most blocks that a sequence of `num_tokens` tokens needs, if none is cached."""
        num_blocks = -(-num_tokens // self.block_size)
        num_kept = min(num_blocks, self.num_ahead)
        return sum(num_kept if window else num_blocks for window in self.windows) + self.num_state_blocks

    def count_tokens(self, num_blocks: int) -> int | None:
        """Counts the tokens of the longest sequence that fits into `num_blocks` blocks; None: no limit."""
        num_blocks -= self.num_state_blocks
        if num_blocks < 0:
            return 0
        if not self.windows:
            return None
        num_full = self.windows.count(0)
        num_windowed = self.num_groups - num_full
        even = num_blocks // self.num_groups
        if not num_windowed or even < self.num_ahead:
            return even * self.block_size
        if not num_full:
            return None
        return (num_blocks - num_windowed * self.num_ahead) // num_full * self.block_size


_CHOICES = {
    "policy": ("fcfs", "priority"),
    "victims": ("last", "auto"),
    "preemption_mode": ("auto", "swap", "recompute"),
}


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """A scheduler's limits and policies. Blocks count as the worker's pools do; device block 0 is never handed out.

    - `max_prefill_chunk`: most tokens of one sequence's prefill in a step; 0: no limit but the budget.
    - `target_step_seconds`: target time of a step with decodes, which limits its prefills; 0: no target.
    - `policy`: "fcfs", or "priority" with `aging_seconds` of waiting for each level of priority.
    - `victims`: the victim among the lowest priority present: the "last" one, or ("auto") the one that loses least.
    - `preemption_mode`: "swap" swaps if possible and else recomputes, "auto" swaps where that is cheaper, "recompute"
      never swaps.
    - `enable_host_prefix_cache`: content that is evicted from the device may go to the host and come back.
    - `num_virtual_engines`: above 1 for a worker with pipeline stages: the decodes are divided among this many steps,
      which are in flight at once, and a sequence is scheduled again only when its last token is known.
    - `watermark`: the share of the device blocks that an admission leaves free.
    - `max_loras`: most adapters of the sequences in a step; an adapter that has waited `lora_patience_seconds` while
      others began is the next.
    - `whole_prompts`: a prompt is computed in one step or not at all, and is not cached.
    - `kv_windows`: for each KV group the number of keys that a query sees; 0: all, which `whole_prompts` needs. Empty
      for a model without attention.
    - `num_state_blocks`: the fixed blocks of a sequence, for layers with a state; 0: none, as with `whole_prompts` and
      with drafts. `state_snapshot_tokens`: at multiples of this many tokens states are kept for the prefix cache; 0: no
      prefix is cached. Rounded up to whole blocks.
    - `max_draft_tokens`, `max_draft_rows`: most tokens that the worker drafts for one sequence and in a whole step; 0:
      none, as with several virtual engines.
    - `prices_drafts`: the worker is told what drafts cost, and none are allowed that cannot pay.
    - `debug_integrity`: check all state after each operation.

    Raises ValueError.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int = 0
    target_step_seconds: float = 0.0
    policy: str = "fcfs"
    aging_seconds: float = 60.0
    victims: str = "last"
    preemption_mode: str = "auto"
    enable_prefix_caching: bool = True
    enable_host_prefix_cache: bool = True
    max_steps_in_flight: int = 2
    num_virtual_engines: int = 1
    watermark: float = 0.01
    max_loras: int = 0
    lora_patience_seconds: float = 2.0
    debug_integrity: bool = False
    weights_version: str = ""
    whole_prompts: bool = False
    kv_windows: tuple[int, ...] = (0,)
    max_draft_tokens: int = 0
    max_draft_rows: int = 0
    prices_drafts: bool = False
    num_state_blocks: int = 0
    state_snapshot_tokens: int = 0

    def __post_init__(self) -> None:
        positive = ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight")
        wrong = [name for name in (*positive, "num_virtual_engines") if getattr(self, name) < 1]
        not_negative = ("num_host_blocks", "max_prefill_chunk", "target_step_seconds", "aging_seconds")
        not_negative += ("max_loras", "lora_patience_seconds", "max_draft_tokens", "max_draft_rows")
        not_negative += ("num_state_blocks", "state_snapshot_tokens")
        wrong += [name for name in not_negative if not getattr(self, name) >= 0]
        if self.num_device_blocks < 2:
            wrong.append("num_device_blocks")
        wrong += [name for name, choices in _CHOICES.items() if getattr(self, name) not in choices]
        if self.max_draft_tokens and (self.num_virtual_engines > 1 or self.num_state_blocks):
            wrong.append("max_draft_tokens")
        if self.num_state_blocks and self.whole_prompts:
            wrong.append("num_state_blocks")
        if not 0 <= self.watermark < 1:
            wrong.append("watermark")
        windows = self.kv_windows
        has_layers = windows or self.num_state_blocks
        if not has_layers or min(windows, default=0) < 0 or (self.whole_prompts and max(windows, default=0)):
            wrong.append("kv_windows")
        if wrong:
            raise ValueError(f"out of range: {', '.join(wrong)}")

    @property
    def max_rows(self) -> int:
        """Most sequences that may run at once: each must be able to have a token of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def kv_groups(self) -> KvBlockGroups:
        """The KV groups. A prefill has room for two pieces beyond its window: one in flight and the next."""
        window = max(self.kv_windows, default=0)
        if not window:
            return KvBlockGroups(self.block_size, self.kv_windows, num_state_blocks=self.num_state_blocks)
        piece = min(self.max_num_batched_tokens, self.max_prefill_chunk or self.max_num_batched_tokens)
        num_decoded = count_decoded_ahead(self.max_steps_in_flight, self.max_draft_tokens)
        num_tokens = window + max(2, self.num_virtual_engines) * piece + num_decoded
        num_ahead = -(-num_tokens // self.block_size) + 2
        return KvBlockGroups(self.block_size, self.kv_windows, num_ahead, self.num_state_blocks)

    @property
    def snapshot_distance(self) -> int:
        """The tokens between two snapshots of a state, in whole blocks; 0: there are none."""
        num_tokens = self.state_snapshot_tokens if self.num_state_blocks else 0
        return -(-num_tokens // self.block_size) * self.block_size

    @property
    def num_slack_tokens(self) -> int:
        """For how many tokens more than it needs a table may have blocks: those of drafts that were wrong."""
        return self.max_steps_in_flight * (1 + self.max_draft_tokens) if self.max_draft_tokens else 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that could run alone. Its last token needs no slot."""
        num_tokens = self.kv_groups.count_tokens(self.num_device_blocks - 1)
        return self.max_model_len if num_tokens is None else min(num_tokens + 1, self.max_model_len)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that generates nothing, which needs a slot for each token and no more."""
        num_tokens = self.kv_groups.count_tokens(self.num_device_blocks - 1)
        longest = self.max_model_len if num_tokens is None else min(num_tokens, self.max_model_len)
        return min(longest, self.max_num_batched_tokens) if self.whole_prompts else longest

    def fit(self, spec: GroupSpec) -> int:
        """Returns the length (prompt and output) at which a request's sequences end unless they stop before.

        Raises NeverFits if one could outgrow the device blocks or the model's length; ValueError for an empty prompt,
        nothing to generate, more sequences or beams than a step has rows, or more sequences than beams.
        """
        if spec.pooling is not None and spec.prompt_token_ids and (spec.n, spec.max_tokens) == (1, 0):
            return self.find_max_length(len(spec.prompt_token_ids), 0)
        if not spec.prompt_token_ids or spec.max_tokens < 1 or not 1 <= spec.n <= spec.num_rows <= self.max_rows:
            raise ValueError(
                f"a request needs a prompt, max_tokens of 1 or more, and 1 to {self.max_rows} sequences or beams"
            )
        return self.find_max_length(len(spec.prompt_token_ids), spec.max_tokens)

    def find_max_length(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Returns the length (prompt and output) at which a sequence ends unless it stops before. Raises NeverFits.

        `max_tokens` 0: the sequence ends with its prompt.
        """
        if not max_tokens:
            if num_prompt_tokens > self.max_prompt_len:
                raise NeverFits(num_prompt_tokens, self.max_prompt_len)
            return num_prompt_tokens
        max_length = min(num_prompt_tokens + max_tokens, self.max_model_len)
        num_tokens = max(max_length, num_prompt_tokens + 1)
        if num_tokens > self.max_tokens:
            raise NeverFits(num_tokens, self.max_tokens)
        return max_length


MAX_SLOTS = 2**16
"""More adapter slots than a replica ever has."""


class LoraRoom:
    """The adapters with which a replica may begin sequences: the `open` ones, and `num_free` others.

    `num_empty`: how many of the free slots are empty, so that an adapter put there replaces none. `take` fills it.
    """

    __slots__ = ("_num_empty", "_num_free", "_open", "_waiting")

    def __init__(self, open: Iterable[int] = (), num_free: int = 0, num_empty: int = 0) -> None:
        self._open = {0, *open}
        self._num_free = num_free
        self._num_empty = num_empty
        self._waiting: set[int] = set()

    def has_slot(self, lora_id: int) -> bool:
        """Whether a sequence with this adapter, or none (0), may begin in the next step."""
        return lora_id in self._open or self._num_free > 0

    def rank(self, lora_id: int) -> tuple[int, int]:
        """Ranks this replica for a sequence with this adapter: more is better. Without an adapter all are equal.

        The best replica has the adapter in a slot; then the one with the most free slots, and the most empty ones.
        """
        if lora_id in self._open:
            return (MAX_SLOTS if lora_id else 0, 0)
        return (self._num_free, self._num_empty)

    def may_wait(self, lora_id: int) -> bool:
        """Whether a sequence may come and wait here for its adapter's slot. One sequence of each adapter may."""
        return lora_id not in self._waiting

    def take(self, lora_id: int) -> None:
        if not self.has_slot(lora_id):
            self._waiting.add(lora_id)
        elif lora_id not in self._open:
            self._num_free -= 1
            self._num_empty = max(self._num_empty - 1, 0)
            self._open.add(lora_id)


class Room:
    """What a replica has free for new requests: tokens of the next step, rows, blocks, and adapter slots.

    `take` fills the room. A request that does not fit is stuck, and those behind may pass it. No more than `MAX_STUCK`
    are accepted, since a request in the backlog can still go anywhere, in any order. A request that `outranks` others
    here need not fit, one of each tenant at a time: others are preempted for it. Of the requests that lack only an
    adapter slot, one of each adapter is accepted.
    """

    MAX_STUCK = 1

    MAX_URGENT = 8

    __slots__ = (
        "_kv_groups",
        "loras",
        "num_blocks",
        "num_rows",
        "num_stuck",
        "num_tokens",
        "outranks",
        "urgent_tenants",
    )

    def __init__(
        self, num_tokens: int, num_rows: int, num_blocks: int, kv_groups: KvBlockGroups, loras: LoraRoom | None = None
    ) -> None:
        self.outranks: Callable[[Group], bool] = lambda _: False
        self.urgent_tenants: set[str] = set()
        self.loras = loras or LoraRoom()
        self.num_tokens = num_tokens
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.num_stuck = 0
        self._kv_groups = kv_groups

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """Whether a request with this many prompt tokens and rows would be admitted next, if it has an adapter slot."""
        has_blocks = self._count_blocks(num_tokens, num_rows) <= self.num_blocks
        return self.num_tokens > 0 and num_rows <= self.num_rows and has_blocks

    def _count_blocks(self, num_tokens: int, num_rows: int) -> int:
        groups = self._kv_groups
        return groups.count_blocks(num_tokens) + num_rows * groups.num_groups + (num_rows - 1) * groups.num_state_blocks

    def takes(self, num_tokens: int, num_rows: int, lora_id: int = 0) -> bool:
        """Whether to accept a request: it fits, or it may wait here for blocks or for its adapter slot."""
        may_wait = self.num_stuck < self.MAX_STUCK and self.num_tokens > 0 and self.num_rows > 0
        has_place = may_wait or self.fits(num_tokens, num_rows)
        return has_place and (self.loras.has_slot(lora_id) or self.loras.may_wait(lora_id))

    def takes_urgent(self, group: Group) -> bool:
        """Whether to accept a request that does not fit, since others are preempted for it."""
        urgent, spec = self.urgent_tenants, group.spec
        may_come = spec.tenant not in urgent and len(urgent) < self.MAX_URGENT and self.loras.has_slot(spec.lora_id)
        return may_come and self.outranks(group)

    def take(self, num_tokens: int, num_rows: int, tenant: str = "", lora_id: int = 0) -> None:
        has_slot = self.loras.has_slot(lora_id)
        self.loras.take(lora_id)
        if not has_slot:
            return
        if not self.fits(num_tokens, num_rows):
            if not self.takes(num_tokens, num_rows):
                self.urgent_tenants.add(tenant)
            self.num_stuck += 1
            return
        self.num_tokens -= num_tokens
        self.num_rows -= num_rows
        self.num_blocks -= self._count_blocks(num_tokens, num_rows)
