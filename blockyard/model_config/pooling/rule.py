"""Records of how a model's rows become vectors, scores or labels. Reads no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.contract.pooling import PoolingKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.model_config.activation import Activation


class Finish(StrEnum):
    """The function that is applied to a head's outputs."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A linear product of the pooled rows, with an optional activation and norm after it."""

    name: str
    """Name of the module in the checkpoint."""
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: Activation | None = None
    folder: str = ""
    """Folder with the module's own weight files; empty: the weights are in the network's files."""
    norm: str = ""
    """The name of a layer norm without bias that follows; empty: none."""
    norm_epsilon: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRule:
    """How a model's rows become vectors, scores or labels."""

    task: Task
    kind: PoolingKind
    """The pooling kind that requests ask the worker for."""
    rows: PoolingKind
    """The rows that the products read: LAST, FIRST, MEAN or TOKENS."""
    products: tuple[Dense, ...] = ()
    """Products applied one after another to the pooled rows; for CLASSIFY the last has an output for each label."""
    finish: Finish = Finish.NONE
    """The function of the outputs; for CLASSIFY only."""
    normalise: bool = field(default=False, repr=False)
    """Whether vectors are scaled to length 1 by default."""
    labels: tuple[str, ...] = field(default=(), repr=False)
    """For CLASSIFY the labels' names; for LABEL_LOGITS the texts of the tokens whose logits are used."""
    label_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """For LABEL_LOGITS the token ids, if the files have ids instead of texts."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Texts to put before an input, keyed by the prompt's name."""
    default_prompt: str = field(default="", repr=False)
    """Name of the prompt that is used if a request names none; empty: no prompt."""
    max_tokens: int = field(default=0, repr=False)
    """The most tokens of an input according to the files; 0: as many as the network takes."""
    lowers_case: bool = field(default=False, repr=False)
    """Whether texts are made lower case before they are tokenized."""
    source: str = field(default="", repr=False)
    """The file that states the rule, in words."""

    @property
    def width(self) -> int:
        """Length of the result, or of each of its rows; 0: the hidden size, or the number of labels asked for."""
        return self.products[-1].out_features if self.products else 0

    @property
    def kinds(self) -> frozenset[PoolingKind]:
        """The pooling kinds that requests may ask for."""
        if self.task is Task.EMBED:
            return frozenset({PoolingKind.LAST, PoolingKind.FIRST, PoolingKind.MEAN, PoolingKind.TOKENS})
        return frozenset({self.kind})
