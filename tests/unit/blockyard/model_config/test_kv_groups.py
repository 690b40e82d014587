"""Which layers have blocks together, and how large these are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard.model_config.decoder_config import Attention, DecoderConfig, Head, Layer, Mlp, Norm
from blockyard.model_config.kv_groups import MAX_GROUPS, KvGroups
from blockyard.model_config.share import stage_layers

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_config(windows: Sequence[int | None], max_model_len: int = 32_768) -> DecoderConfig:
    attention = Attention(num_heads=4, num_kv_heads=1, head_dim=256, scale=1.0)
    layer = Layer(mixer=attention, feed=Mlp(inner_features=64), norm=Norm())
    layers = tuple(replace(layer, mixer=replace(attention, window=window)) for window in windows)
    return DecoderConfig(
        vocab_size=100,
        hidden_size=64,
        max_model_len=max_model_len,
        layers=layers,
        rotaries=(),
        final_norm=Norm(),
        head=Head(),
    )


def gemma3(num_layers: int, window: int) -> list[int | None]:
    return [None if index % 6 == 5 else window for index in range(num_layers)]


SHAPES = {
    "270M": (gemma3(18, 512), 6),
    "1B": (gemma3(26, 512), 7),
    "4B": (gemma3(34, 1024), 7),
    "12B": (gemma3(48, 1024), 6),
    "27B": (gemma3(62, 1024), 7),
    "gpt-oss": ([128, None] * 12, 2),
    "Gemma 2": ([4096, None] * 13, 2),
    "nearly even": ([4096] * 12 + [None] * 13, 2),
}


@pytest.mark.parametrize(("windows", "num_groups"), SHAPES.values(), ids=SHAPES)
def test_layers_of_one_reach_are_divided_evenly(windows: list[int | None], num_groups: int) -> None:
    groups = KvGroups.of(make_config(windows), "cpu")
    assert groups.num_groups == num_groups
    assert [groups.windows[group] for group in groups.of_layers] == [window or 0 for window in windows]
    layers = range(len(windows))
    size = groups.count_layers(layers)
    places = Counter(groups.places(layers))
    assert max(places.values()) == 1, "two layers have one place"
    assert max(place for _, place in places) == size - 1
    # What blocks hold that no layer uses, of a sequence of 8192 tokens.
    needed = sum(min(window or 8192, 8192) for window in windows)
    held = sum(size * min(window or 8192, 8192) for window in groups.windows)
    assert held <= 1.1 * needed


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_have_about_as_many_layers_of_each_group(num_stages: int) -> None:
    windows = gemma3(48, 1024)
    groups = KvGroups.of(make_config(windows), "cpu")
    for stage in range(num_stages):
        layers = stage_layers(len(windows), num_stages, stage)
        assert groups.count_layers(layers) <= -(-len(layers) // groups.num_groups) + 1
        assert {place for _, place in groups.places(layers)} == set(range(groups.count_layers(layers)))


def test_layers_of_one_reach_are_one_group() -> None:
    for windows, expected in (([None] * 4, 0), ([64] * 4, 64), ([32_768] * 4, 0), ([40_000, None], 0)):
        assert KvGroups.of(make_config(windows), "cpu") == KvGroups((expected,), (0,) * len(windows))


def test_on_a_gpu_all_layers_are_one_group_that_keeps_everything() -> None:
    assert KvGroups.of(make_config(gemma3(18, 512)), "cuda") == KvGroups((0,), (0,) * 18)


def test_there_are_not_too_many_groups() -> None:
    groups = KvGroups.of(make_config([None, *[512] * 59]), "cpu")
    assert groups.num_groups <= MAX_GROUPS
    assert groups.count_layers(range(60)) == 4
