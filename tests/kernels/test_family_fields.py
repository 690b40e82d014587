"""Each field of every architecture's config.json taken out, each flag turned over, each number changed: our logits are
those of transformers, or the field is refused by name. None is passed over.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.other_fields import HARMLESS
from tests.kit.kernels.families import RECIPES, make_model
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.model_config import read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from worker_service.models.model_config import ModelConfig

LENGTH = 50
TOKEN_IDS = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
# The smallest that keep what a recipe is about: by the names that its fields may have.
SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    # Below the length of the text, which decides what transformers takes.
    "original_max_position_embeddings": 32,
    "sliding_window": 20,
}
# Other values of what is no flag, where the field is there.
OTHERS: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu", "quick_gelu"],
    "hidden_activation": ["gelu", "silu"],
    "activation_function": ["gelu", "silu"],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["chunked_attention"] * 2],
    "sliding_window": [None, 7],
    "tie_word_embeddings": [True, False],
    "attn_logit_softcapping": [None, 3.0],
    "final_logit_softcapping": [None, 3.0],
    "query_pre_attn_scalar": [7],
    "head_dim": [None, 16],
    "num_key_value_heads": [None, 4, 1],
    "logit_scale": [0.3],
    "partial_rotary_factor": [0.5],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 300.0}, {"rope_type": "dynamic", "factor": 2.0}],
    "rope_theta": [400.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "no_rope_layers": [[0, 1], [1]],
    "no_rope_layer_interval": [2],
    "sliding_window_pattern": [2, "LG"],
    "rope_local_base_freq": [500.0],
    "clip_qkv": [0.5],
    "word_embed_proj_dim": [48],
    "use_bidirectional_attention": [True],
    "qk_layernorm": [True],
    "use_qk_norm": [True],
    "mlp_only_layers": [[0]],
    "decoder_sparse_step": [2],
}
# Beside each change, so that what depends on it shows.
ADDED = ("rope_scaling", "rope_theta", "hidden_activation")


def cases(
    fields: dict[str, Any], others: dict[str, list[Any]], counted: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields changed configurations, each with what was done.

    Args:
        fields: of config.json.
        others: values of fields that are no flags.
        counted: fields that count, though they are harmless to most networks.
    """
    yield "as it is", fields
    for name, value in fields.items():
        # A time step has no least length in transformers' decoding, and one in its way with a whole text.
        if (name in HARMLESS and name not in counted) or name in (
            "architectures",
            "model_type",
            "dtype",
            "time_step_min",
        ):
            continue
        yield f"{name} left out", {other: given for other, given in fields.items() if other != name}
        if isinstance(value, bool):
            yield f"{name} turned over", {**fields, name: not value}
        elif name not in others and isinstance(value, int | float):
            # Twice an epsilon is nothing.
            yield f"{name} larger", {**fields, name: 0.1 if name.endswith(("eps", "epsilon")) else value * 2}
    for name in sorted(fields.keys() | {*ADDED, *counted}):
        for other in others.get(name, []):
            if other != fields.get(name):
                yield f"{name} = {other!r}", {**fields, name: other}


@torch.no_grad()
def expected(folder: Path, compute: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
    """What transformers makes of a config.json, of weights that it writes beside it; None: it refuses it too."""
    given = (folder / "config.json").read_text()
    try:
        return compute(make_model(transformers.AutoConfig.from_pretrained(folder), folder, seed=1))
    except Exception:  # noqa: BLE001 (whatever it says to a configuration that it does not take)
        return None
    finally:
        (folder / "config.json").write_text(given)


def _logits_of(model: Any) -> torch.Tensor:
    """In float64: two float32 networks may be as far from each other as both are from the truth together.

    The experts of mixtures have products of float32 alone.
    """
    ids = torch.tensor([TOKEN_IDS])
    with suppress(RuntimeError):
        return model.double()(ids, use_cache=False).logits[0]
    return model.float()(ids, use_cache=False).logits[0]


def check(name: str, folder: Path, checked: list[tuple[ModelConfig, str]]) -> str | None:
    """Compares one configuration; returns what is wrong with it, None where there was nothing to compare.

    `checked`: those that were, as we and as transformers read them; what both read as one of them needs no comparison.
    """
    try:
        ours = read_config(folder, None)
    except BlockyardError as error:
        return None if error.reason is Reason.MODEL_NOT_LOADED and error.violations else f"{name}: {error.message}"
    with suppress(Exception):  # what transformers does not take is told below
        read = ours, transformers.AutoConfig.from_pretrained(folder).to_json_string(use_diff=False)
        if read in checked:
            return ""
        checked.append(read)
    logits = expected(folder, _logits_of)
    if logits is None:
        return None
    # A state must fit into a block.
    got = StepRunner.load(folder, torch.float32, block_size=256).run("whole", TOKEN_IDS, [LENGTH])
    worst = float((got - logits).abs().max() / logits.abs().max())
    return "" if worst <= 2e-5 else f"{name}: {worst:.1e}"


# Models of which another recipe has all fields, and those whose fields are another's.
_SKIPPED = ("_parallel", "_serial", "_multimodal")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.endswith(_SKIPPED)])
def test_a_field_counts_as_in_transformers_or_is_refused(recipe: str, tmp_path: Path) -> None:
    made = RECIPES[recipe]
    sizes: dict[str, Any] = {field: SMALL.get(field, value) for field, value in made.fields.items()}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][:2]
    if "layers_block_type" in sizes:
        sizes["layers_block_type"] = ["linear_attention", "mlp", "full_attention"]
    if "attn_layer_indices" in sizes:
        sizes["attn_layer_indices"] = [1]
    config = getattr(transformers, made.config)(**sizes)
    config.architectures = [made.architecture]
    fields = json.loads(config.to_json_string(use_diff=False))
    found: list[str | None] = []
    checked: list[tuple[ModelConfig, str]] = []
    for name, changed in cases(fields, OTHERS):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        found.append(check(name, tmp_path, checked))
    assert not any(found), [problem for problem in found if problem]
    assert found.count("") > 10
