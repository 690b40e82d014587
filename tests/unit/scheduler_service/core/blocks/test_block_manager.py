"""What the manager promises whatever a planner does: the order of cache operations makes no difference to content."""

from __future__ import annotations

from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.cost import CostModel
from scheduler_service.core.sequence import Group, Sequence
from scheduler_service.core.step import StepBuilder
from tests.unit.scheduler_service.core.harness import configure, make_spec


def make_manager(num_device_blocks: int, num_host_blocks: int, *, caches: bool = True) -> BlockManager:
    """Pools of blocks of two tokens."""
    config = configure(
        block_size=2,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=caches,
    )
    return BlockManager(config, CostModel(config.block_size))


def make_sequence(prompt: tuple[int, ...]) -> Sequence:
    return Group(make_spec(prompt=prompt, max_tokens=8), 1, len(prompt) + 8, 0.0).sequences[0]


def compute(manager: BlockManager, sequence: Sequence) -> None:
    """As if all its known tokens were scheduled and answered."""
    sequence.num_scheduled = sequence.num_computed = len(sequence.token_ids)
    sequence.is_prefilling = False
    manager.publish(sequence)


def cache(manager: BlockManager, prompt: tuple[int, ...]) -> None:
    """Leave a prompt's blocks behind, held by nobody."""
    sequence = make_sequence(prompt)
    assert manager.admit(sequence, StepBuilder(1, 9), 0)
    compute(manager, sequence)
    manager.free(sequence)


def test_the_source_of_a_copy_is_no_destination_in_its_step() -> None:
    manager = make_manager(4, 0, caches=True)
    cache(manager, (1, 2))
    cache(manager, (3, 4))
    step = StepBuilder(1, 9)
    first, second = make_sequence((1, 2)), make_sequence((3, 4))
    assert manager.admit(first, step, 0)
    assert manager.admit(second, step, 0)  # with no block left for a copy, it computes the whole block
    assert len(step.copies) == 1
    assert second.num_scheduled == 0
    assert step.copies[0].source not in second.block_ids
    assert manager.device.num_free == 0
    manager.settle(step)
    assert manager.device.num_free == 1


def test_a_host_block_that_is_read_is_not_written_in_its_step() -> None:
    manager = make_manager(6, 1, caches=False)
    first, second = make_sequence((1, 2)), make_sequence((3, 4))
    for sequence in (first, second):
        assert manager.admit(sequence, StepBuilder(1, 9), 0)
        compute(manager, sequence)
    assert manager.swap_out(first, StepBuilder(2, 9))
    step = StepBuilder(3, 9)
    assert manager.swap_in(first, step, 0)
    assert not manager.swap_out(second, step)
    manager.settle(step)
    assert manager.swap_out(second, StepBuilder(4, 9))


def test_who_has_nothing_of_its_own_is_not_swapped_out() -> None:
    manager = make_manager(6, 4, caches=False)
    group = Group(make_spec(prompt=(1, 2, 3), n=2), 1, 9, 0.0)
    parent, child = group.sequences
    assert manager.admit(parent, StepBuilder(1, 9), 0)
    compute(manager, parent)
    manager.fork(parent, child)
    assert not manager.swap_out(child, StepBuilder(2, 9))
    assert manager.host.num_free == 4


def test_what_it_has_not_computed_itself_is_not_found_on_the_way_back() -> None:
    """It would be written into, and others hold it."""
    manager = make_manager(8, 4, caches=True)
    sequence = make_sequence((1, 2, 3))
    assert manager.admit(sequence, StepBuilder(1, 9), 0)
    sequence.num_scheduled = 1  # half of the first block
    assert manager.swap_out(sequence, StepBuilder(2, 9))
    cache(manager, (1, 2, 9))
    step = StepBuilder(3, 9)
    assert manager.swap_in(sequence, step, 0)
    assert len(step.swap_in) == 1
    assert not manager.device.is_published(sequence.block_ids[0])


def test_no_room_on_the_host() -> None:
    manager = make_manager(6, 1, caches=False)
    sequence = make_sequence((1, 2, 3))
    assert manager.admit(sequence, StepBuilder(1, 9), 0)
    compute(manager, sequence)
    table = list(sequence.block_ids)
    assert not manager.swap_out(sequence, StepBuilder(2, 9))
    assert sequence.block_ids == table


def test_a_sequence_that_never_had_blocks_frees_none() -> None:
    manager = make_manager(6, 1, caches=True)
    manager.free(make_sequence((1, 2, 3)))
    assert manager.device.num_free == 5


def test_the_watermark_is_a_share_of_the_blocks_that_can_be_used() -> None:
    for num_device_blocks, num_watermark in ((201, 2), (100, 0)):
        config = configure(num_device_blocks=num_device_blocks, watermark=0.01)
        assert BlockManager(config, CostModel(4)).num_watermark == num_watermark
