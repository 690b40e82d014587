"""The rule, limits and labels of a model that embeds, scores or classifies; read when its task is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fields import read_object
from blockyard.model_config.pooling.reading import read_rule
from gateway.pooling.inputs import InputEncoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard.contract.scheduling import ModelFacts
    from blockyard.model_config.pooling.rule import PoolingRule
    from gateway.text.tokenizer import Tokenizer

    RuleReader = Callable[[Task], "ModelRule | None"]

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


_ASKS = {Task.EMBED: "for vectors", Task.CLASSIFY: "for labels", Task.SCORE: "for scores"}


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model for pooling calls. `max_tokens`: the limit for an input. `width`: values in a vector; 0: unknown."""

    task: Task
    rule: PoolingRule
    encoder: InputEncoder
    max_tokens: int
    vocab_size: int
    label_token_ids: tuple[int, ...]
    width: int

    def make_pooling(
        self, *, normalise: bool = False, dimensions: int = 0, leaves_raw: bool = False, second_from: int = 0
    ) -> Pooling:
        return Pooling(self.rule.kind, self.label_token_ids, normalise, dimensions, leaves_raw, second_from)


class PooledModels:
    """Finds the model for the task that the scheduler serves. Reads the model's files once for each task.

    Args:
        tokenizer: the model's tokenizer.
        read_rule: reads the pooling rule for a task from the model's files; raises BlockyardError.
    """

    def __init__(self, tokenizer: Tokenizer, read_rule: RuleReader) -> None:
        self._tokenizer = tokenizer
        self._read_rule = read_rule
        self._rules: dict[Task, ModelRule] = {}

    def find(self, facts: ModelFacts, *tasks: Task) -> PooledModel:
        """Finds the model for a call that needs one of these tasks.

        Raises BlockyardError: FEATURE_DISABLED if the model is served for another task, MODEL_NOT_LOADED if the
        gateway's files lack the rule.
        """
        if facts.task not in tasks:
            served = "generate" if facts.task is Task.UNSPECIFIED else facts.task.value
            message = f"the model is served to {served}, and cannot be asked {_ASKS[tasks[0]]} (--task)"
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        rule, width, has_token_types = self.rule_of(facts.task)
        limits = (facts.max_model_len, facts.max_prompt_len, rule.max_tokens)
        max_tokens = min(limit for limit in limits if limit)
        encoder = InputEncoder(self._tokenizer, rule, max_tokens, has_token_types)
        return PooledModel(facts.task, rule, encoder, max_tokens, facts.vocab_size, encoder.find_labels(), width)

    def rule_of(self, task: Task) -> ModelRule:
        """Returns the rule for a task; raises BlockyardError MODEL_NOT_LOADED."""
        if task not in self._rules:
            rule = self._read_rule(task)
            if rule is None:
                message = (
                    f"the model's files on this gateway do not say how to {task.value}: "
                    "copy all of them, as the worker has them"
                )
                raise BlockyardError(Reason.MODEL_NOT_LOADED, message)
            self._rules[task] = rule
        return self._rules[task]
