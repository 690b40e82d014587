"""What weights in 8-bit floating point cost in accuracy, beside int8, on the same text."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.eight_bit_products import measure
from benchmarks.kernels.int8_accuracy import DEMO_MODEL, token_rows

# A text that never changes.
TEXT = Path(__file__).parents[2] / "LICENSE"


def test_weights_in_fp8_take_the_demo_model_at_most_twice_as_far_from_bfloat16_as_int8():
    """The gate of the offer, which e4m3 for rows too is not within."""
    rows = token_rows(DEMO_MODEL, [TEXT.read_text(encoding="utf-8")], 150, 3)
    found = measure(["iiiii", "wwwww", "88888"], rows)
    int8, weights, both = (summary["kl_mean"] for summary in found.values())
    assert 0 < weights <= 2 * int8 < both
    assert found["wwwww"]["top1_agreement"] > 0.9
