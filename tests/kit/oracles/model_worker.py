"""A worker without tensors that executes steps strictly: the truth that the scheduler is held against.

It owns rows, two pools of slots, and nothing else. A slot holds a name of the tokens up to its position instead of KV,
so a read of anything but the sequence's own prefix is seen at once. It knows nothing of messages and of time. A step
that breaks a rule of the protocol is refused with `StepRefused`; the worker is of no use afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING
from zlib import crc32

from scheduler_service.core.beam_search.beams import BeamSearchState
from scheduler_service.core.values import BlockPair, Fork, GroupSpec, NewSequence, SchedulerOutput, StepResult
from tests.kit.oracles.pooled_numbers import pool_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from scheduler_service.core.beam_search.beams import Hypothesis
    from tests.kit.oracles.hostile_drafter import HostileDrafter

ROOT = 0x6B6579
"""The name of no tokens."""


class StepRefused(Exception):
    """A step that breaks a rule."""


def root_of(spec: GroupSpec, weights: str = "") -> int:
    """The name of no tokens, for a request: with an adapter or other weights all its KV is another's."""
    root = extend_name(ROOT, crc32(weights.encode())) if weights else ROOT
    # Not `hash`, which differs from process to process.
    return extend_name(root, int.from_bytes(spec.lora.digest)) if spec.lora else root


def extend_name(name: int, token_id: int) -> int:
    """The name of a prefix that is one token longer."""
    return hash((name, token_id))


def name_in_group(name: int, group: int) -> int:
    """The name of what a KV group keeps of a prefix: another one in each."""
    return hash((name, group)) if group else name


def name_of_state(name: int, place: int) -> int:
    """The name of what a fixed block keeps of a prefix: another one in each."""
    return hash((name, place, 1))


def seed_of_request(spec: GroupSpec) -> int:
    """A seed that depends on the request alone."""
    return crc32(spec.request_id.encode())


def sample(seed: int, sequence_index: int, position: int, name: int, vocab_size: int, masked: Iterable[int]) -> int:
    """The token at this output position, of those that are not masked: a hash of everything it may depend on."""
    left_out = sorted({token_id for token_id in masked if 0 <= token_id < vocab_size})
    token_id = hash((seed, sequence_index, position, name)) % (vocab_size - len(left_out))
    for other in left_out:
        token_id += other <= token_id
    return token_id


def propose(name: int, vocab_size: int, masked: Iterable[int]) -> tuple[tuple[int, float], ...]:
    """All tokens that are not masked with a log probability, likeliest first: a hash of all it may depend on.

    In eighths, so that many tie.
    """
    allowed = set(range(vocab_size)) - set(masked)
    logprobs = {token_id: -(1 + hash((name, token_id)) % 64) / 8 for token_id in allowed}
    return tuple(sorted(logprobs.items(), key=lambda entry: (-entry[1], entry[0])))


@dataclass(slots=True)
class Row:
    """What the worker keeps of a sequence. `names[i]` names the first `i` tokens."""

    spec: GroupSpec
    sequence_index: int
    prompt_length: int
    token_ids: list[int]
    names: list[int]
    block_ids: list[int]
    fixed_ids: list[int]
    num_computed: int
    num_beam_candidates: int = 0
    # The length at which it ends by itself; 0: the scheduler ends it.
    max_length: int = 0
    # The first token that the present step computes.
    first_query: int = 0
    has_ended: bool = False
    # Sampled, and not appended yet: the scheduler brings it.
    sampled: int | None = None

    @classmethod
    def make(cls, new: NewSequence, weights: str = "") -> Row:
        """The row of a sequence that was not known, for the weights of a name."""
        row = cls(
            new.spec,
            new.sequence_index,
            new.prompt_length,
            [],
            [root_of(new.spec, weights)],
            list(new.block_ids),
            list(new.fixed_block_ids),
            new.num_computed_tokens,
            new.num_beam_candidates,
            new.max_length,
        )
        for token_id in new.token_ids:
            row.append(token_id)
        return row

    def fork(self, fork: Fork) -> Row:
        """The row of a child."""
        return Row(
            self.spec,
            fork.sequence_index,
            self.prompt_length,
            self.token_ids.copy(),
            self.names.copy(),
            list(fork.block_ids),
            list(fork.fixed_block_ids),
            self.num_computed,
            self.num_beam_candidates,
            self.max_length,
        )

    def draw(self, seed: int, vocab_size: int) -> int:
        """Its next token, which the scheduler has to bring with the step that computes it."""
        position = len(self.token_ids) - self.prompt_length
        masked = self.spec.stop_token_ids if position < self.spec.min_tokens else ()
        self.sampled = sample(seed, self.sequence_index, position, self.names[-1], vocab_size, masked)
        return self.sampled

    def append(self, token_id: int) -> None:
        """Another token is known."""
        self.token_ids.append(token_id)
        self.names.append(extend_name(self.names[-1], token_id))

    def propose(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """Its likeliest next tokens, best first."""
        masked = self.spec.stop_token_ids if len(self.token_ids) - self.prompt_length < self.spec.min_tokens else ()
        return propose(self.names[-1], vocab_size, masked)[: self.num_beam_candidates]

    def sample(self, seed: int, vocab_size: int) -> int:
        """Its next token, which it appends; a stop token after min_tokens ends it, and so does its length."""
        position = len(self.token_ids) - self.prompt_length
        token_id = self.draw(seed, vocab_size)
        self.append(token_id)
        is_stop = position >= self.spec.min_tokens and token_id in self.spec.stop_token_ids
        self.has_ended = is_stop or len(self.token_ids) == self.max_length
        return token_id


class ModelWorker:
    """Executes steps one after another. Slots are named `pool[block * block_size + offset]`; 0 is an empty one."""

    def __init__(
        self,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        *,
        vocab_size: int = 32,
        seed_of: Callable[[GroupSpec], int] = seed_of_request,
        takes_ids: bool = False,
        max_loras: int = 0,
        windows: tuple[int, ...] = (0,),
        weights: str = "",
        max_draft_tokens: int = 0,
        max_draft_rows: int = 0,
        drafter: HostileDrafter | None = None,
        num_state_blocks: int = 0,
    ) -> None:
        """`takes_ids`: it appends nothing that it samples, as with pipeline stages. `windows`: of its KV groups.

        `num_state_blocks`: the fixed blocks of a sequence, which hold a state: a name of all tokens that made it.

        `weights`: the name of its weights, on which all that it computes depends. It may draft so many tokens of a
        sequence and of a step; `drafter` does.
        """
        self.num_state_blocks = num_state_blocks
        self.max_draft_tokens = max_draft_tokens
        self.max_draft_rows = max_draft_rows
        self.drafter = drafter
        self.weights = weights
        self.windows = windows
        self.lora_slots = [0] * max_loras
        self.takes_ids = takes_ids
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.vocab_size = vocab_size
        self.seed_of = seed_of
        self.device = [0] * (num_device_blocks * block_size)
        self.host = [0] * (num_host_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.last_step_id = 0

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Do what the step says, in the order that the protocol binds."""
        self._check_shape(step)
        self.last_step_id = step.step_id
        for fork in step.forks:
            self._fork(fork)
        for sequence_id, token_id in step.input_ids:
            self._take_input(step, sequence_id, token_id)
        for sequence_id in step.finished_sequence_ids:
            self.rows.pop(sequence_id, None)
        for slot, lora_id in step.activated_loras:
            self._activate(slot, lora_id)
        for new in step.new_sequences:
            self._add(new)
        self._update_tables(step)
        self._move(step)
        return self._compute(step)

    # Before anything is touched

    def _check_shape(self, step: SchedulerOutput) -> None:
        _require(step.step_id == self.last_step_id + 1, f"step {step.step_id} after {self.last_step_id}")
        _require(len(step.sequence_ids) == len(step.num_new_tokens), "rows in columns of two lengths")
        _require(len(step.appended_sequence_ids) == len(step.appended_block_ids), "tables in columns of two lengths")
        _require_unique(step.sequence_ids, "rows")
        _require_unique([new.sequence_id for new in step.new_sequences], "new sequences")
        _require_unique([fork.child_id for fork in step.forks], "children")
        _require_unique([sequence_id for sequence_id, _ in step.input_ids], "inputs")
        replaced = {sequence_id for sequence_id, _ in step.replaced_tables}
        _require(not replaced & set(step.appended_sequence_ids), "a table is replaced and grows")
        self._check_pairs(step)
        tables = [new.block_ids for new in step.new_sequences] + [fork.block_ids for fork in step.forks]
        tables += [table for _, table in step.replaced_tables]
        for table in tables:
            self._check_table(table)
        fixed = [new.fixed_block_ids for new in step.new_sequences] + [fork.fixed_block_ids for fork in step.forks]
        for table in fixed + [table for _, table in step.replaced_fixed_tables]:
            _require(len(table) == self.num_state_blocks, f"{len(table)} fixed blocks of a sequence")
            self._check_device_blocks(table)
        self._check_device_blocks(step.appended_block_ids)

    def _check_table(self, table: Sequence[int]) -> None:
        _require(len(table) % max(len(self.windows), 1) == 0, "a table lacks blocks of some KV group")
        _require(bool(self.windows) or not table, "a table of a model without attention")
        for group, window in enumerate(self.windows):
            self._check_device_blocks(block for block in table[group :: len(self.windows)] if block or not window)

    def _check_pairs(self, step: SchedulerOutput) -> None:
        out, back, copies = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
        self._check_device_blocks(
            [pair.source for pair in out]
            + [pair.destination for pair in back]
            + [block for pair in copies for block in pair]
        )
        self._check_host_blocks([pair.destination for pair in out] + [pair.source for pair in back])
        for pairs in (out, back, copies):
            _require_unique([pair.destination for pair in pairs], "destinations")
        _require(not _sources(copies) & _destinations(copies), "a copy's destination is a source too")
        _require(not _sources(back) & _destinations(out), "a host block is read and written by swaps of one step")
        _require(not _destinations(back) & _destinations(copies), "a block is swapped in and copied over")

    def _check_device_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            _require(0 < block < self.num_device_blocks, f"device block {block}")

    def _check_host_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            _require(0 <= block < self.num_host_blocks, f"host block {block}")

    def _activate(self, slot: int, lora_id: int) -> None:
        _require(0 <= slot < len(self.lora_slots), f"slot {slot}")
        _require(lora_id not in self.lora_slots, f"adapter {lora_id} is in a slot already")
        self.lora_slots[slot] = lora_id

    # Rows and tables

    def _row(self, sequence_id: int) -> Row:
        _require(sequence_id in self.rows, f"sequence {sequence_id} is unknown")
        return self.rows[sequence_id]

    def _fork(self, fork: Fork) -> None:
        parent = self._row(fork.parent_id)
        _require(fork.child_id not in self.rows, f"child {fork.child_id} is known already")
        self.rows[fork.child_id] = parent.fork(fork)
        has_same_blocks = not parent.num_beam_candidates or self._are_same(parent.block_ids, fork.block_ids)
        _require(has_same_blocks, f"child {fork.child_id} begins on other blocks than its parent")

    def _are_same(self, parent: Sequence[int], child: Sequence[int]) -> bool:
        """Whether a child has its parent's blocks, but for those that were given back since the parent was told."""
        if not self.windows:
            return not parent and not child
        may_lack = [self.windows[place % len(self.windows)] > 0 for place in range(len(child))]
        places = zip(parent, child, may_lack, strict=False)
        return len(parent) == len(child) and all(one == other or (lacks and not other) for one, other, lacks in places)

    def _take_input(self, step: SchedulerOutput, sequence_id: int, token_id: int) -> None:
        row = self._row(sequence_id)
        _require(self.takes_ids or row.num_beam_candidates > 0, f"sequence {sequence_id} chooses its tokens itself")
        is_its_own = row.num_beam_candidates > 0 or row.sampled in (None, token_id)
        _require(is_its_own, f"sequence {sequence_id} gets a token that it did not sample")
        count = dict(zip(step.sequence_ids, step.num_new_tokens, strict=True)).get(sequence_id)
        _require(count == 1, f"sequence {sequence_id} gets a token and computes {count}")
        row.append(token_id)

    def _add(self, new: NewSequence) -> None:
        _require(new.sequence_id not in self.rows, f"new sequence {new.sequence_id} is known already")
        _require(0 <= new.num_computed_tokens < len(new.token_ids), "a new sequence has nothing to compute")
        _require(0 < new.prompt_length <= len(new.token_ids), "a prompt is longer than what is known")
        is_whole = not new.num_computed_tokens or not new.spec.computes_prompt
        _require(is_whole, "a prompt that is to be computed whole begins elsewhere")
        self.rows[new.sequence_id] = Row.make(new, self.weights)

    def _update_tables(self, step: SchedulerOutput) -> None:
        for sequence_id, block in zip(step.appended_sequence_ids, step.appended_block_ids, strict=True):
            self._row(sequence_id).block_ids.append(block)
        for sequence_id, table in step.replaced_tables:
            self._row(sequence_id).block_ids[:] = table
        for sequence_id, table in step.replaced_fixed_tables:
            self._row(sequence_id).fixed_ids[:] = table
        for fork in step.forks:
            parent, child = self._row(fork.parent_id), self._row(fork.child_id)
            # A beam's child computes a token of its own at once, so its table may be another one by now.
            tables_agree = self._are_same(parent.block_ids, child.block_ids) or child.num_beam_candidates > 0
            _require(tables_agree, f"child {fork.child_id} has other blocks than its parent")

    # Blocks

    def _move(self, step: SchedulerOutput) -> None:
        for pair in step.blocks_to_swap_out:
            self._copy(self.device, self.host, pair)
        for pair in step.blocks_to_swap_in:
            self._copy(self.host, self.device, pair)
        for pair in step.blocks_to_copy:
            self._copy(self.device, self.device, pair)

    def _copy(self, source: list[int], destination: list[int], pair: BlockPair) -> None:
        size = self.block_size
        content = source[pair.source * size : (pair.source + 1) * size]
        destination[pair.destination * size : (pair.destination + 1) * size] = content

    def _slot(self, row: Row, position: int, group: int) -> int:
        # Simulations spend most of their time here: no message is formatted before it is needed.
        place = position // self.block_size * len(self.windows) + group
        if place >= len(row.block_ids):
            raise StepRefused(f"position {position} is beyond the table")
        if row.block_ids[place] <= 0:
            raise StepRefused(f"position {position} has no block in KV group {group}")
        return row.block_ids[place] * self.block_size + position % self.block_size

    # What is computed

    def _compute(self, step: SchedulerOutput) -> StepResult:
        """All writes, then all reads, then all draws: what one row writes over another's prefix is seen."""
        skipped = [sequence_id for sequence_id in step.sequence_ids if self._row(sequence_id).has_ended]
        work = zip(step.sequence_ids, step.num_new_tokens, strict=True)
        active = {sequence_id: count for sequence_id, count in work if sequence_id not in set(skipped)}
        for sequence_id in active:
            lora_id = self.rows[sequence_id].spec.lora_id
            _require(lora_id in (0, *self.lora_slots), f"sequence {sequence_id} has its adapter in no slot")
        drafts = self._draft(step, active)
        if self.num_state_blocks:
            self._advance_states(active)
        self._write(active, drafts)
        self._share_logits(step.forks, active)
        for sequence_id in active:
            self._read(sequence_id)
        sampled = [key for key in active if self.rows[key].num_computed == len(self.rows[key].token_ids)]
        beams = [key for key in sampled if self.rows[key].num_beam_candidates]
        sampled = [key for key in sampled if not self.rows[key].num_beam_candidates]
        pooled = tuple((key, self._pool(key)) for key in sampled if self.rows[key].spec.pooling is not None)
        sampled = [key for key in sampled if self.rows[key].spec.pooling is None]
        runs = [self._choose(step.step_id, self.rows[key], drafts.get(key, [])) for key in sampled]
        candidates = {key: self.rows[key].propose(self.vocab_size) for key in beams}
        return StepResult(
            step.step_id,
            tuple(sampled),
            tuple([token_id for run in runs for token_id in run]),
            tuple(skipped),
            beam_candidates=candidates or None,
            pooled=pooled,
            num_tokens=tuple(map(len, runs)) if drafts else (),
            num_draft_tokens=sum(map(len, drafts.values())),
            num_accepted_tokens=sum(max(len(run) - 1, 0) for run in runs),
        )

    def _draft(self, step: SchedulerOutput, active: dict[int, int]) -> dict[int, list[int]]:
        """Drafts for the sequences that are allowed some: decodes, with room in their tables and in their length."""
        allowed = step.max_draft_tokens
        _require(len(allowed) in (0, len(step.sequence_ids)), "drafts in a column of another length")
        _require(sum(allowed) <= self.max_draft_rows, f"{sum(allowed)} drafts, and a step has {self.max_draft_rows}")
        drafts: dict[int, list[int]] = {}
        for key, most in zip(step.sequence_ids, allowed, strict=False):
            if not most or key not in active:
                continue
            row = self.rows[key]
            _require(most <= self.max_draft_tokens, f"{most} drafts of sequence {key}")
            is_decode = active[key] == 1 and row.num_computed + 1 == len(row.token_ids) > row.prompt_length
            _require(is_decode and not row.num_beam_candidates, f"sequence {key} drafts and is no decode")
            _require(len(row.token_ids) + most <= row.max_length, f"sequence {key} drafts past its end")
            num_slots = len(row.block_ids) // len(self.windows) * self.block_size
            _require(len(row.token_ids) + most <= num_slots, f"sequence {key} has no room for its drafts")
            if self.drafter:
                drafts[key] = self.drafter.draft(step.step_id, row, self.seed_of(row.spec), self.vocab_size, most)
        return drafts

    def _choose(self, step_id: int, row: Row, drafts: list[int]) -> list[int]:
        """Chooses a row's next token, and one more for each draft that was the token chosen before."""
        if self.drafter and drafts and self.drafter.must_repeat(step_id, row):
            row.num_computed -= 1
            return []
        choose = Row.draw if self.takes_ids else Row.sample
        run = [choose(row, self.seed_of(row.spec), self.vocab_size)]
        for draft in drafts:
            if row.has_ended or run[-1] != draft:
                break
            row.num_computed += 1
            run.append(choose(row, self.seed_of(row.spec), self.vocab_size))
        return run

    def _pool(self, sequence_id: int) -> bytes:
        """The numbers of a prompt, which end its sequence."""
        row = self.rows[sequence_id]
        row.has_ended = True
        return pool_numbers(row.spec.pooling or b"", row.names[-1])

    def _write(self, active: dict[int, int], drafts: dict[int, list[int]]) -> None:
        written: set[int] = set()
        for sequence_id, num_new_tokens in active.items():
            row = self.rows[sequence_id]
            end = row.num_computed + num_new_tokens
            _require(end <= len(row.token_ids), f"sequence {sequence_id} computes tokens that nobody knows")
            row.first_query = row.num_computed
            names = row.names
            if drafted := drafts.get(sequence_id):
                names = [*accumulate(drafted, extend_name, initial=names[-1])]
                names = [*row.names, *names[1:]]
            for position in range(row.num_computed, len(names) - 1 if drafted else end):
                for group in range(len(self.windows)):
                    slot = self._slot(row, position, group)
                    if slot in written:
                        raise StepRefused(f"sequence {sequence_id} writes what another one writes")
                    written.add(slot)
                    self.device[slot] = name_in_group(names[position + 1], group)
            row.num_computed = end

    def _advance_states(self, active: dict[int, int]) -> None:
        """Goes on with the state of each row: all reads, then all writes. No row's state lies in another's blocks."""
        rows = [self.rows[key] for key in active]
        fixed = [block for row in rows for block in row.fixed_ids]
        _require_unique(fixed, "fixed blocks")
        # A table of a group with a window still names what was given back.
        whole = [group for group, window in enumerate(self.windows) if not window]
        tables = {b for row in rows for group in whole for b in row.block_ids[group :: len(self.windows)]}
        _require(not tables.intersection(fixed), "a block is in two tables")
        for key, count in active.items():
            row = self.rows[key]
            # The state before the first token is nothing, whatever the blocks hold.
            if count and row.num_computed and self._states(row) != self._name_states(row, row.num_computed):
                raise StepRefused(f"sequence {key} begins at {row.num_computed} with another state")
        for key, count in active.items():
            if count:
                row = self.rows[key]
                names = self._name_states(row, row.num_computed + count)
                for block, name in zip(row.fixed_ids, names, strict=True):
                    self.device[block * self.block_size : (block + 1) * self.block_size] = [name] * self.block_size

    def _states(self, row: Row) -> list[int]:
        """What the fixed blocks of a row hold: one name in all slots of a block."""
        blocks = [self.device[b * self.block_size : (b + 1) * self.block_size] for b in row.fixed_ids]
        _require(all(len(set(block)) == 1 for block in blocks), "a fixed block holds no state")
        return [block[0] for block in blocks]

    def _name_states(self, row: Row, num_tokens: int) -> list[int]:
        return [name_of_state(row.names[num_tokens], place) for place in range(self.num_state_blocks)]

    def _share_logits(self, forks: Sequence[Fork], active: dict[int, int]) -> None:
        """Children compute nothing: they are where their parent is, which must have come to its last token."""
        parents = {fork.child_id: fork.parent_id for fork in forks}
        for sequence_id, num_new_tokens in active.items():
            if num_new_tokens:
                continue
            _require(sequence_id in parents, f"sequence {sequence_id} computes nothing and is no child of this step")
            parent = self._row(parents[sequence_id])
            _require(parents[sequence_id] in active, f"the parent of {sequence_id} computes nothing")
            _require(parent.num_computed == len(parent.token_ids), f"the parent of {sequence_id} has no logits")
            child = self.rows[sequence_id]
            child.num_computed = child.first_query = parent.num_computed

    def _read(self, sequence_id: int) -> None:
        """Reads all that some query of the step sees; of who computes nothing, what its next one will."""
        row = self.rows[sequence_id]
        for group, window in enumerate(self.windows):
            for position in range(max(0, row.first_query - window + 1) if window else 0, row.num_computed):
                content = self.device[self._slot(row, position, group)]
                if content != name_in_group(row.names[position + 1], group):
                    raise StepRefused(f"sequence {sequence_id} reads another's KV at {position}")


def generate_alone(
    spec: GroupSpec,
    sequence_index: int,
    *,
    max_model_len: int,
    vocab_size: int = 32,
    seed_of: Callable[[GroupSpec], int] = seed_of_request,
) -> list[int]:
    """The output ids of one sequence that nothing disturbs: the oracle."""
    if spec.beams:
        return search_alone(spec, max_model_len=max_model_len, vocab_size=vocab_size)[sequence_index].token_ids
    prompt = spec.prompt_token_ids
    row = Row.make(NewSequence(0, sequence_index, prompt, len(prompt), 0, (), spec, spec.num_beam_candidates))
    max_length = min(len(prompt) + spec.max_tokens, max_model_len)
    while len(row.token_ids) < max_length and not row.has_ended:
        row.sample(seed_of(spec), vocab_size)
    return row.token_ids[len(prompt) :]


def pool_alone(spec: GroupSpec) -> bytes:
    """The numbers of a prompt that nothing disturbs: the oracle."""
    prompt = spec.prompt_token_ids
    row = Row.make(NewSequence(0, 0, prompt, len(prompt), 0, (), spec))
    return pool_numbers(spec.pooling or b"", row.names[-1])


def search_alone(spec: GroupSpec, *, max_model_len: int, vocab_size: int = 32) -> list[Hypothesis]:
    """The same for a beam search, the best first: every beam is computed from its tokens alone."""
    assert spec.beams
    search = BeamSearchState(spec.beams, spec.stop_token_ids, spec.min_tokens, spec.num_beam_candidates)
    max_outputs = min(len(spec.prompt_token_ids) + spec.max_tokens, max_model_len) - len(spec.prompt_token_ids)
    outputs: list[list[int]] = [[]]
    while outputs:
        rows = [_make_row(spec, output) for output in outputs]
        chosen = search.advance([row.propose(vocab_size) for row in rows], outputs.__getitem__, max_outputs)
        outputs = [[*outputs[one.rank], one.token_id] for one in chosen]
    return search.hypotheses


def _make_row(spec: GroupSpec, output: list[int]) -> Row:
    prompt = spec.prompt_token_ids
    return Row.make(NewSequence(0, 0, (*prompt, *output), len(prompt), 0, (), spec, spec.num_beam_candidates))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise StepRefused(what)


def _require_unique(values: Sequence[int], what: str) -> None:
    _require(len(set(values)) == len(values), f"{what} are named twice")


def _sources(pairs: Iterable[BlockPair]) -> set[int]:
    return {pair.source for pair in pairs}


def _destinations(pairs: Iterable[BlockPair]) -> set[int]:
    return {pair.destination for pair in pairs}
