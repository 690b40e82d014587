"""How much memory there is, by control groups of either version, and how many blocks fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from blockyard.capacity.memory import (
    CPU_RESERVE_BYTES,
    ControlGroups,
    HostMemory,
    Usage,
    cpu_usage,
    fitting_utilization,
    fixed_plan,
    plan_cache,
    read_host_memory,
    tighter,
)
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.device.memory import (
    compute_threads,
    give_back,
    read_peak_memory,
    reset_peak_memory,
    room_for_weights,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


def groups(folder: Path, membership: str, files: dict[str, str]) -> ControlGroups:
    (folder / "membership").write_text(membership)
    for name, content in files.items():
        path = folder / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return ControlGroups(folder / "mount", folder / "membership")


def test_version_2_tells_limit_and_what_is_left(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        "0::/pod/box\n",
        {
            "pod/box/memory.max": str(2 * GIB),
            "pod/box/memory.current": str(GIB),
            # Cached files make way, whether they were read once or twice; programs that run do not.
            "pod/box/memory.stat": f"anon 5\ninactive_file {256 * MIB}\nactive_file {64 * MIB}\nfile_mapped {32 * MIB}",
            "pod/box/cpu.max": "150000 100000",
            "pod/memory.max": "max",
            "pod/memory.current": "12345",
            "pod/cpu.max": "max 100000",
        },
    )
    assert found.memory() == (2 * GIB, GIB + 288 * MIB)
    assert found.num_cpus() == 2


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        "0::/pod/box\n",
        {
            "pod/box/memory.max": str(8 * GIB),
            "pod/box/memory.current": "0",
            "pod/memory.max": str(GIB),
            "pod/memory.current": str(768 * MIB),
            "pod/box/cpu.max": "400000 100000",
            "pod/cpu.max": "100000 100000",
        },
    )
    assert found.memory() == (GIB, 256 * MIB)
    assert found.num_cpus() == 1


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        "0::/docker/0123\n",
        {"memory.max": str(GIB), "memory.current": str(100 * MIB), "cpu.max": "50000 100000"},
    )
    assert found.memory() == (GIB, GIB - 100 * MIB)
    assert found.num_cpus() == 1


def test_version_1_tells_the_same(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        "11:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/\n",
        {
            "memory/box/memory.limit_in_bytes": str(3 * GIB),
            "memory/box/memory.usage_in_bytes": str(GIB),
            "memory/box/memory.stat": f"cache 9\ntotal_inactive_file {3 * MIB}\ntotal_active_file {2 * MIB}\n"
            f"total_mapped_file {4 * MIB}\nmapped_file 5",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "5",
            "cpu/box/cpu.cfs_quota_us": "300000",
            "cpu/box/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert found.memory() == (3 * GIB, 2 * GIB + MIB)
    assert found.num_cpus() == 3


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/\n", {"memory.max": "max"})
    assert found.memory() is None
    assert found.num_cpus() is None
    memory = read_host_memory(found)
    assert memory.total_bytes == psutil.virtual_memory().total
    assert 0 < memory.process_bytes < memory.total_bytes
    nothing = ControlGroups(tmp_path / "no", tmp_path / "where")
    assert nothing.memory() is None


def test_a_limit_hides_the_machine(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/\n", {"memory.max": str(GIB), "memory.current": str(GIB - MIB)})
    memory = read_host_memory(found)
    assert (memory.total_bytes, memory.available_bytes) == (GIB, MIB)


def test_weights_have_the_room_that_cached_files_make(tmp_path: Path) -> None:
    files = {"memory.max": str(3 * MIB), "memory.current": str(3 * MIB), "memory.stat": f"inactive_file {MIB}"}
    assert room_for_weights(torch.device("cpu"), groups(tmp_path, "0::/\n", files)) == MIB


def test_what_is_mapped_is_never_more_than_what_is_cached(tmp_path: Path) -> None:
    files = {"memory.max": str(GIB), "memory.current": str(MIB), "memory.stat": f"active_file 5\nfile_mapped {MIB}"}
    assert groups(tmp_path, "0::/\n", files).memory() == (GIB, GIB - MIB), "other groups' files may be mapped here"


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/\n", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert found.memory() == (GIB, 0)


def test_threads_stay_within_the_quota(tmp_path: Path) -> None:
    quota = groups(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    assert compute_threads(0, quota) == 1
    assert compute_threads(3, quota) == 3
    unlimited = ControlGroups(tmp_path / "no", tmp_path / "where")
    assert 1 <= compute_threads(0, unlimited) <= torch.get_num_threads()


USAGE = Usage(
    total_bytes=10 * GIB, available_bytes=9 * GIB, weights_bytes=2 * GIB, activation_bytes=GIB, other_bytes=GIB
)


def plan(usage: Usage = USAGE, **fields: object) -> tuple[int, int, int]:
    asked = {
        "block_size": 32,
        "block_bytes": MIB,
        "utilization": 0.8,
        "swap_space_bytes": GIB,
        "host_shares_device": True,
        "max_useful_blocks": 10**6,
    } | fields
    made = plan_cache(usage, **asked)  # type: ignore[arg-type]
    assert made.num_device_blocks * MIB <= made.memory.cache_bytes
    return made.num_device_blocks, made.num_host_blocks, made.memory.cache_bytes


def test_on_a_cpu_both_pools_share_what_is_left() -> None:
    assert plan() == (3 * 1024, 1024, 4 * GIB)


def test_on_a_gpu_the_host_pool_lies_elsewhere() -> None:
    assert plan(host_shares_device=False) == (4 * 1024, 1024, 4 * GIB)


def test_the_host_pool_takes_at_most_half_of_a_shared_memory() -> None:
    assert plan(swap_space_bytes=100 * GIB) == (2 * 1024, 2 * 1024, 4 * GIB)
    assert plan(swap_space_bytes=0) == (4 * 1024, 0, 4 * GIB)


def test_what_others_hold_is_not_promised() -> None:
    tight = replace(USAGE, available_bytes=3 * GIB)
    assert plan(tight, swap_space_bytes=0) == (2 * 1024, 0, 2 * GIB)
    assert plan(tight, swap_space_bytes=0, host_shares_device=False) == (2 * 1024, 0, 2 * GIB)


def test_nothing_left_is_no_blocks() -> None:
    assert plan(replace(USAGE, weights_bytes=20 * GIB)) == (0, 0, 0)
    assert plan(replace(USAGE, available_bytes=0)) == (0, 0, 0)


def test_more_blocks_than_are_of_use_are_not_made() -> None:
    assert plan(max_useful_blocks=100)[:2] == (100, 1024)


def test_what_a_process_holds_beyond_its_weights_is_other() -> None:
    usage = cpu_usage(HostMemory(10 * GIB, 9 * GIB, 3 * GIB), 2 * GIB, MIB)
    assert usage.other_bytes == GIB + CPU_RESERVE_BYTES
    assert usage.available_bytes == 9 * GIB - CPU_RESERVE_BYTES
    assert cpu_usage(HostMemory(10 * GIB, 9 * GIB, GIB), 2 * GIB, MIB).other_bytes == CPU_RESERVE_BYTES


def test_a_peak_is_measured_anew() -> None:
    if not reset_peak_memory():
        pytest.fail("this system does not let a process reset its peak")
    before = read_peak_memory()
    memory = bytearray(64 * MIB)
    memory[::4096] = b"x" * len(memory[::4096])
    assert read_peak_memory() - before > 60 * MIB
    del memory
    assert reset_peak_memory()
    assert read_peak_memory() - before < 30 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_is_zero_and_can_be_written(dtype: torch.dtype) -> None:
    block_format = BlockFormat(num_layers=2, num_kv_heads=3, block_size=8, head_dim=4, dtype=dtype)
    assert block_format.block_bytes == 2 * 2 * 3 * 8 * 4 * dtype.itemsize
    pool = allocate_pool(block_format, 5, torch.device("cpu"))
    assert pool.shape == (5, 2, 2, 3, 8, 4)
    assert pool.dtype is dtype
    assert not pool.any()
    pool[4] = 1.5
    assert pool.sum() == 1.5 * 384
    assert pool.data_ptr() % (2 * MIB) == 0
    assert allocate_pool(block_format, 0, torch.device("cpu")).shape[0] == 0


def test_a_pool_beyond_two_gib_elements_is_addressed_right() -> None:
    """Its last block lies past 2**31 elements; only what is written takes memory."""
    block_format = BlockFormat(num_layers=4, num_kv_heads=8, block_size=32, head_dim=64, dtype=torch.bfloat16)
    num_blocks = 2**31 // (block_format.block_bytes // 2) + 3
    pool = allocate_pool(block_format, num_blocks, torch.device("cpu"))
    pool[num_blocks - 1] = 2.0
    assert pool.numel() > 2**31
    assert pool[num_blocks - 1].float().mean() == 2.0
    assert not pool[num_blocks - 2].any()
    assert not pool[3].any()


def test_what_a_neighbour_gives_back_while_a_step_is_profiled_is_not_relied_on() -> None:
    first = replace(USAGE, available_bytes=4 * GIB, activation_bytes=0, other_bytes=2 * GIB)
    assert tighter(first, USAGE) == replace(USAGE, available_bytes=4 * GIB, other_bytes=2 * GIB)
    assert tighter(replace(USAGE, activation_bytes=0), first) == first


def test_a_fixed_pool_is_as_large_as_it_is_told_whatever_else_there_is() -> None:
    fixed = fixed_plan(GIB, block_size=16, block_bytes=MIB, cache_bytes=3 * GIB + 5, swap_space_bytes=2 * GIB)
    assert (fixed.num_device_blocks, fixed.num_host_blocks) == (3 * 1024, 2 * 1024)


@pytest.mark.parametrize(
    ("free", "captured", "expected"),
    [
        (GIB, 0, None),
        (GIB // 2, GIB // 2, None),
        (GIB // 2, 0, 0.75),
        (GIB // 4, GIB // 4, 0.75),
        (GIB // 2 - 1, 0, 0.749),
        (0, 0, 0.7),
    ],
)
def test_too_little_free_names_the_utilization_to_use(free: int, captured: int, expected: float | None) -> None:
    made = plan_cache(
        USAGE,
        block_size=16,
        block_bytes=MIB,
        utilization=0.8,
        swap_space_bytes=0,
        host_shares_device=False,
        max_useful_blocks=10**6,
    )
    assert fitting_utilization(made, free, captured) == expected


def test_freed_memory_goes_back_though_something_behind_it_lives() -> None:
    size = 100_000
    blocks = [b"x" * size for _ in range(2000)]
    last = blocks.pop()
    blocks.clear()
    before = psutil.Process().memory_info().rss
    give_back(torch.device("cpu"))
    assert before - psutil.Process().memory_info().rss > 1000 * size
    assert len(last) == size
