"""How config.json is read where it has several models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.errors import BlockyardError
from blockyard.model_config.network import read_network
from tests.kit.kernels.families import family_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Json = dict[str, Any]


def changed(name: str, folder: Path, change: Callable[[Json], Json]) -> Path:
    fields = json.loads((family_model(name) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(fields)))
    return folder


@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_older_files_have_the_text_models_fields_among_those_of_all(kind: str, tmp_path: Path) -> None:
    def flatten(fields: Json) -> Json:
        text = fields.pop("text_config")
        rotary = {**text.pop("rope_parameters"), "type": kind}
        del rotary["rope_type"], text["model_type"]
        return {**text, **fields, "rope_scaling": rotary}

    expected = read_network(family_model("qwen2_5_vl_multimodal"))
    assert read_network(changed("qwen2_5_vl_multimodal", tmp_path, flatten)) == expected


def test_the_text_model_alone_is_served_and_that_is_remarked() -> None:
    network = read_network(family_model("mistral3_multimodal"))
    assert "the text model alone is served" in network.remarks[0]
    assert network.rotaries[0].query_growth
    assert not network.head.is_tied


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text_config": {"model_type": "mamba"}}, "text_config is of a 'mamba', not supported (supported: mistral,"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"text_config": None}, "text_config must be an object"),
    ],
)
def test_a_text_model_of_another_kind_is_refused_by_name(change: Json, told: str, tmp_path: Path) -> None:
    with pytest.raises(BlockyardError, match="text_config") as raised:
        read_network(changed("mistral3_multimodal", tmp_path, lambda fields: {**fields, **change}))
    assert told in raised.value.message
