"""The pool alone: free lists, references, hashes, eviction."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.blocks.block_pool import BlockPool


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4, first_block=1)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_pool_may_be_empty() -> None:
    pool = BlockPool(0)
    assert (pool.num_usable, pool.num_free) == (0, 0)
    pool.check({})


def test_the_last_holder_frees() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


def test_a_free_block_stays_findable_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, name(1))
    pool.release(block)
    assert pool.find(name(1)) == block
    other = pool.allocate()  # the unused one goes first
    assert other != block
    assert pool.find(name(1)) == block
    assert pool.allocate() == block
    assert pool.find(name(1)) is None
    assert pool.num_cached == 0


def test_the_first_with_a_content_keeps_the_name() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, name(1))
    pool.publish(second, name(1))
    assert pool.find(name(1)) == first
    assert not pool.is_published(second)
    pool.publish(first, name(2))
    assert pool.find(name(2)) is None


def test_eviction_is_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for number, block in enumerate(blocks):
        pool.publish(block, name(number))
        pool.release(block)
    pool.share(blocks[0])  # used again
    pool.release(blocks[0])
    pool.refresh(name(1))
    pool.refresh(name(99))
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[0], blocks[1]]


def test_refreshing_a_held_block_does_nothing() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, name(1))
    pool.refresh(name(1))
    pool.check({block: 1})


def test_reset_forgets_everything() -> None:
    pool = BlockPool(4, first_block=1)
    pool.publish(pool.allocate(), name(1))
    pool.reset()
    assert pool.num_free == 3
    assert pool.find(name(1)) is None
    pool.check({})


def test_what_nobody_holds_is_forgotten() -> None:
    pool = BlockPool(4)
    held, free = pool.allocate(), pool.allocate()
    for block in (held, free):
        pool.publish(block, name(block))
    pool.release(free)
    assert pool.forget_evictable() == 1
    assert pool.find(name(held)) == held
    assert pool.find(name(free)) is None
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.check({held: 1})
    assert pool.forget_evictable() == 0


@pytest.mark.parametrize(
    "harm",
    [
        lambda pool: pool._unused.append(pool._unused[0]),
        lambda pool: pool._unused.pop(),
        lambda pool: pool._evictable.update({pool._unused[0]: None}),
        lambda pool: pool.references.__setitem__(1, 2),
        lambda pool: pool._hash_of_block.clear(),
        lambda pool: pool._evictable.update({pool._unused.pop(): None}),
    ],
)
def test_check_sees_what_is_wrong(harm) -> None:
    pool = BlockPool(5, first_block=1)
    held = pool.allocate()
    pool.publish(held, name(1))
    pool.check({held: 1})
    harm(pool)
    with pytest.raises(AssertionError):
        pool.check({held: 1})


class PoolMachine(RuleBasedStateMachine):
    """Against a naive pool: lists of holders, of names, and of the order of release."""

    @initialize(size=st.integers(1, 6))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size + 1, first_block=1)
        self.size = size
        self.held: list[int] = []
        self.names: dict[int, bytes] = {}
        self.released: list[int] = []

    @precondition(lambda self: len(set(self.held)) < self.size)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held
        if block in self.names:  # evicted: there was no other, and it is the least recently used
            assert len(set(self.held)) + len(self.released) == self.size
            assert block == self.released[0]
            self.released.remove(block)
            del self.names[block]
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)
        if block not in self.held and block in self.names:
            self.released.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 9))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.publish(block, name(number))
        if block not in self.names and name(number) not in self.names.values():
            self.names[block] = name(number)

    @rule(number=st.integers(0, 9))
    def find_and_share(self, number: int) -> None:
        block = self.pool.find(name(number))
        assert (block is not None) == (name(number) in self.names.values())
        if block is not None:
            assert self.names[block] == name(number)
            self.pool.share(block)
            self.held.append(block)
            if block in self.released:
                self.released.remove(block)

    @rule()
    def forget(self) -> None:
        assert self.pool.forget_evictable() == len(self.released)
        for block in self.released:
            del self.names[block]
        self.released = []

    @invariant()
    def agrees(self) -> None:
        self.pool.check({block: self.held.count(block) for block in self.held})
        assert self.pool.num_free == self.size - len(set(self.held))
        assert self.pool.num_cached == len(self.names)


TestPoolMachine = PoolMachine.TestCase
