"""Estimates what it costs to recompute or to swap a sequence's KV. Knows nothing of sequences and pools."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.step_time import StepTimeModel

_FORGETTING = 0.9  # of older steps with swaps a step with swaps leaves so much
# Until it is measured: a block is computed in the time in which so many are moved. A PCIe link moves the KV of a token
# in a hundredth of the time that its forward pass takes, host memory on a CPU in less.
_GUESSED_ADVANTAGE = 20.0
# A measure of swaps is forgotten after so many times the seconds that they took, at least _MIN_AGE_SECONDS, and guessed
# again. One that says that swaps do not pay ends them, so no other would ever be made; and where it is right, to find
# that out again takes a hundredth of the time.
_MAX_AGE = 100.0
_MIN_AGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step did: tokens of prefills, decodes, and blocks moved between device and host.

    `takes_memory`: some of these were host blocks that nothing was written to before.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_swapped_blocks: int
    takes_memory: bool = False


@dataclass(slots=True)
class CostModel:
    """Seconds of recomputing and of swapping, by the worker's own timings; guessed until there are any."""

    block_size: int
    num_kv_groups: int = 1
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    _swap_seconds: float = 0.0
    _num_swapped: float = 0.0
    _now: float = 0.0
    _forget_at: float = 0.0

    def pass_time(self, now: float) -> None:
        """Forgets a measure of swaps that is too old. `now`: seconds, of any clock that does not go back."""
        self._now = now
        if self._num_swapped and now >= self._forget_at:
            self._swap_seconds = self._num_swapped = 0.0

    def note_step(self, work: StepWork, forward_seconds: float, cache_seconds: float) -> None:
        """Notes how long a step took to compute and to move blocks, in seconds; 0: the worker did not say.

        Memory that is written for the first time has to be taken from the system, and that is slow once: such a step
        tells nothing about swaps.
        """
        if forward_seconds > 0 and (work.num_prefill_tokens or work.num_decodes):
            self.step_time.note(work.num_prefill_tokens, work.num_decodes, forward_seconds)
        if cache_seconds > 0 and work.num_swapped_blocks and not work.takes_memory:
            self._swap_seconds = _FORGETTING * self._swap_seconds + cache_seconds
            self._num_swapped = _FORGETTING * self._num_swapped + work.num_swapped_blocks
            self._forget_at = self._now + max(_MAX_AGE * self._swap_seconds, _MIN_AGE_SECONDS)

    def recompute_seconds(self, num_tokens: int) -> float:
        """Estimates the seconds to compute tokens again."""
        return num_tokens * self.step_time.seconds_per_prefill_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Estimates the seconds to move blocks once, in one direction."""
        if self._num_swapped:
            return num_blocks * self._swap_seconds / self._num_swapped
        return self.recompute_seconds(num_blocks * self.block_size) / self.num_kv_groups / _GUESSED_ADVANTAGE

    def preempt_seconds(self, num_tokens: int) -> float:
        """Estimates the seconds to preempt a victim and bring it back: by swaps or by recomputing, the cheaper."""
        return min(self._swap_both_ways(num_tokens), self.recompute_seconds(num_tokens))

    def prefers_swap(self, num_tokens: int) -> bool:
        """Whether a victim with so many tokens is cheaper to swap out and in than to compute again."""
        return self._swap_both_ways(num_tokens) < self.recompute_seconds(num_tokens)

    def prefers_host_block(self) -> bool:
        """Whether a block that the host has is cheaper to bring back than to compute."""
        return self.swap_seconds(self.num_kv_groups) < self.recompute_seconds(self.block_size)

    def _swap_both_ways(self, num_tokens: int) -> float:
        return 2 * self.swap_seconds(-(-num_tokens // self.block_size) * self.num_kv_groups)
