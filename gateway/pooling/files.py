"""Reads a model's pooling rule and the width of its rows from its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blockyard.model_config.fields import read_object
from blockyard.model_config.pooling.reading import read_rule

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.contract.models import Task
    from blockyard.model_config.pooling.rule import PoolingRule

_WIDTHS = ("hidden_size", "n_embd", "dim")


class ModelRule(NamedTuple):
    """A model's pooling rule.

    Attributes:
        rule: the rule.
        width: the number of values in a vector; 0: the files do not say.
        has_token_types: whether the network distinguishes two texts by token types.
    """

    rule: PoolingRule
    width: int
    has_token_types: bool = False


def read_model_rule(folder: Path, task: Task) -> ModelRule | None:
    """Reads the pooling rule in a model's folder for a task; None if the model only generates.

    Raises BlockyardError MODEL_NOT_LOADED.
    """
    rule = read_rule(folder, task)
    if rule is None:
        return None
    config = read_object(folder / "config.json")
    return ModelRule(rule, rule.width or _read_row_width(config), _has_token_types(config))


def _has_token_types(config: dict[str, Any]) -> bool:
    """Returns whether a network has token types. Among the supported networks, only BERT may have several."""
    if config.get("model_type") != "bert":
        return False
    count = config.get("type_vocab_size", 2)
    return isinstance(count, int) and count > 1


def _read_row_width(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    parts = [config, cast("dict[str, Any]", text)] if isinstance(text, dict) else [config]
    widths = [part.get(name) for part in parts for name in _WIDTHS]
    return next((width for width in widths if isinstance(width, int)), 0)
