"""Swaps beside compute give what doing all in order gives, however streams interleave; and wait no more than that."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from blockyard_kernels.cuda.swap import SwapStreams
from tests.kit.kernels.late_streams import LateDevice, lazy_swaps
from tests.kit.kernels.swap_traces import Pairs, Pools, Rows, TraceStep, make_trace, run_in_order

CPU = torch.device("cpu")
NUM_SEEDS = 40


def run_late(trace: list[TraceStep], seed: int, deaf: tuple[str, str] | None = None) -> tuple[tuple[Any, ...], int]:
    """Runs on a device that is behind by as many steps as it likes; returns what came of it, and the waits."""
    pools, device, chooser = Pools(CPU), LateDevice(), random.Random(seed + 1000)
    if deaf is not None:
        stream = next(stream for stream in device.all if stream.name == deaf[0])
        stream.deaf_to = deaf[1]
    swaps = SwapStreams(pools.device, pools.host, device.streams())
    pace = chooser.choice((1, 3, 8))
    for step in trace:
        swaps.transfer(*step.transfers(), step.rows)
        device.compute.queue.append(lambda rows=step.rows: pools.compute(rows))
        device.go_on(chooser, pace)
    swaps.synchronize()
    return pools.all(), sum(len(stream.waits) for stream in device.all)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_any_interleaving_gives_what_the_order_gives(seed: int):
    trace = make_trace(seed)
    found, num_waits = run_late(trace, seed)
    assert found == run_in_order(trace)
    assert num_waits > 0


@pytest.mark.parametrize(("waiting", "awaited"), list(permutations(("compute", "out", "into"), 2)))
def test_without_any_one_kind_of_waits_results_are_wrong(waiting: str, awaited: str):
    """A control: the traces and the device are such that each kind is needed."""
    for seed in range(NUM_SEEDS):
        trace = make_trace(seed)
        if run_late(trace, seed, (waiting, awaited))[0] != run_in_order(trace):
            return
    pytest.fail(f"{waiting} need not wait for {awaited}")


def rows_of(*rows: tuple[int, int, list[int]]) -> Rows:
    """Rows of (new tokens, length, table)."""
    new, lens, tables = zip(*rows, strict=True) if rows else ((), (), ())
    widest = max(map(len, tables), default=0)
    padded = [table + [0] * (widest - len(table)) for table in tables]
    return Rows(
        np.array(new, np.int64), np.array(lens, np.int64), np.array(padded, np.int32).reshape(len(rows), widest)
    )


class Bench:
    """Swaps on a device that does nothing by itself; steps compute nothing."""

    def __init__(self) -> None:
        self.device, pools = LateDevice(), Pools(CPU)
        self.swaps = SwapStreams(pools.device, pools.host, self.device.streams())

    def step(self, rows: Rows, out: Pairs | None = None, into: Pairs | None = None) -> list[tuple[str, str]]:
        """Enqueues a step, and returns which stream was made to wait for which."""
        before = [len(stream.waits) for stream in self.device.all]
        self.swaps.transfer(out or [], into or [], [], rows)
        self.device.compute.queue.append(lambda: None)
        found = zip(self.device.all, before, strict=True)
        return [(stream.name, awaited) for stream, count in found for awaited in stream.waits[count:]]


def test_a_swap_out_waits_for_its_last_writer_and_nothing_waits_for_it_without_need():
    bench = Bench()
    assert bench.step(rows_of((1, 9, [1, 2]))) == []
    assert bench.step(rows_of((1, 17, [3, 4, 5]))) == []
    assert bench.step(rows_of((1, 18, [3, 4, 5])), out=[(1, 0), (2, 1)]) == [("out", "compute")]
    bench.device.out.synchronize()
    assert len(bench.device.compute.queue) == 3, "of three steps, and events behind two, the first and its are done"
    assert bench.step(rows_of((1, 19, [3, 4, 5]))) == []


def test_what_a_step_only_reads_may_be_swapped_out_beside_it():
    bench = Bench()
    bench.step(rows_of((1, 17, [1, 2, 3])))
    assert bench.step(rows_of((1, 18, [1, 2, 3])), out=[(1, 0), (2, 1)]) == []


def test_who_writes_to_a_block_that_is_swapped_out_waits():
    bench = Bench()
    bench.step(rows_of(), out=[(2, 0)])
    assert bench.step(rows_of((1, 5, [1]), (1, 16, [2, 3]))) == [], "block 2 is read alone"
    assert bench.step(rows_of((1, 8, [2]))) == [("compute", "out")]


def test_a_swap_in_starts_beside_the_step_before_and_its_readers_wait():
    bench = Bench()
    bench.step(rows_of((1, 9, [1, 2])))
    assert bench.step(rows_of((1, 10, [1, 2]), (1, 12, [4, 5])), into=[(0, 4), (1, 5)]) == [("compute", "into")]
    assert bench.device.into.queue, "which can go on before anything has computed"
    assert not bench.device.into.is_stuck


def test_a_swap_in_waits_for_who_still_reads_its_destination_and_for_its_bytes():
    bench = Bench()
    bench.step(rows_of((1, 9, [1, 2])), out=[(3, 0)])
    waits = bench.step(rows_of(), into=[(0, 1)])
    assert waits == [("into", "out"), ("into", "compute")] or waits == [("into", "compute"), ("into", "out")]


def test_a_host_block_is_written_over_when_it_was_read():
    bench = Bench()
    bench.step(rows_of(), into=[(0, 1)])
    assert bench.step(rows_of(), out=[(2, 0)]) == [("out", "into")]


def test_what_is_done_is_waited_for_by_nobody():
    bench = Bench()
    bench.step(rows_of((1, 9, [1, 2])), out=[(3, 0)])
    bench.step(rows_of())
    bench.device.finish()
    assert bench.step(rows_of((1, 8, [3])), into=[(0, 1)], out=[(2, 1)]) == []


def test_lazy_swaps_are_done_when_compute_waits():
    pools, streams = Pools(CPU), lazy_swaps()
    swaps = SwapStreams(pools.device, pools.host, streams)
    before = pools.host[0].clone()
    swaps.transfer([(3, 0)], [], [], rows_of())
    assert torch.equal(pools.host[0], before)
    swaps.transfer([], [], [(1, 3)], rows_of())
    assert torch.equal(pools.host[0], torch.full_like(before, 3))
    assert torch.equal(pools.device[3], torch.full_like(before, 1))
