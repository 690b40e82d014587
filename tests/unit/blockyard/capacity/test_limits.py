"""What is refused before anything is counted, and how long sequences may be."""

from __future__ import annotations

import pytest

from blockyard.capacity.devices import check_gpu_dtype, choose_device_type
from blockyard.capacity.limits import DoesNotFit, choose_max_model_len, max_useful_blocks
from blockyard.errors import BlockyardError


def test_a_length_is_what_the_model_takes_and_the_blocks_hold() -> None:
    assert choose_max_model_len("auto", 2048, 1000, 16) == 2048
    assert choose_max_model_len("auto", 2048, 11, 16) == 160
    assert choose_max_model_len(100, 2048, 11, 16) == 100


@pytest.mark.parametrize(
    ("asked", "num_blocks", "why"),
    [
        ("auto", 1, "1 device blocks leave no room for any token: the memory is too small"),
        (2049, 1000, "--max-model-len 2049 is above the 2048 tokens of the model"),
        (161, 11, "--max-model-len 161 is above the 160 tokens that 11 device blocks hold"),
    ],
)
def test_a_length_that_cannot_be_is_refused(asked: int, num_blocks: int, why: str) -> None:
    with pytest.raises(DoesNotFit, match=why):
        choose_max_model_len(asked, 2048, num_blocks, 16)


def test_blocks_for_twice_all_sequences_are_of_use() -> None:
    assert max_useful_blocks(8, 2048, 32) == 2 * 8 * 64 + 1


def test_bfloat16_needs_an_ampere_gpu() -> None:
    with pytest.raises(BlockyardError, match=r"Tesla T4 has compute capability 7\.5: use float16"):
        check_gpu_dtype("bfloat16", "Tesla T4", (7, 5))
    check_gpu_dtype("bfloat16", "A100", (8, 0))
    check_gpu_dtype("float16", "Tesla T4", (7, 5))


@pytest.mark.parametrize(
    ("requested", "allowed", "has_gpu", "chosen"),
    [("auto", "auto", True, "cuda"), ("auto", "auto", False, "cpu"), ("cuda", "auto", True, "cuda")],
)
def test_a_gpu_is_chosen_where_there_is_one(requested: str, allowed: str, has_gpu: bool, chosen: str) -> None:
    assert choose_device_type(requested, allowed, has_gpu=has_gpu) == chosen


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BlockyardError, match="torch sees no GPU here"):
        choose_device_type("cuda", "auto", has_gpu=False)
