"""How a model's rows become vectors, scores or labels: records, and nothing of files."""

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
    """What is made of the numbers of a head."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A product of what is pooled, and what follows it."""

    name: str
    """Of the module, in the checkpoint."""
    in_features: int
    out_features: int
    has_bias: bool = True
    activation: Activation | None = None
    folder: str = ""
    """That has the module's files, if they are not the network's own; its name stands in the module's."""
    norm: str = ""
    """The name of a layer norm without bias that follows; empty: none."""
    norm_epsilon: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRule:
    """How a model's rows become vectors, scores or labels."""

    task: Task
    kind: PoolingKind
    """What to ask for."""
    rows: PoolingKind
    """The rows that the products read: LAST, FIRST, MEAN or TOKENS."""
    products: tuple[Dense, ...] = ()
    """One after another, of what is pooled; of CLASSIFY the last has a row for each label."""
    finish: Finish = Finish.NONE
    """Of CLASSIFY."""
    normalise: bool = field(default=False, repr=False)
    """Whether the files make vectors of length 1."""
    labels: tuple[str, ...] = field(default=(), repr=False)
    """Of CLASSIFY: the labels' names. Of LABEL_LOGITS: the tokens whose logits count, as texts."""
    label_token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Of LABEL_LOGITS, where the files have ids."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Texts to put before an input, by name."""
    default_prompt: str = field(default="", repr=False)
    """The name of the one to use where none is asked for; empty: none."""
    max_tokens: int = field(default=0, repr=False)
    """Of an input, as the files say; 0: as many as the network takes."""
    lowers_case: bool = field(default=False, repr=False)
    """Whether texts are made lower case before they are tokenized."""
    source: str = field(default="", repr=False)
    """Which file says so, in words."""

    @property
    def width(self) -> int:
        """Numbers of what is answered, or of each row; 0: as many as a row of the network, or as labels asked for."""
        return self.products[-1].out_features if self.products else 0

    @property
    def kinds(self) -> frozenset[PoolingKind]:
        """What sequences may ask for."""
        if self.task is Task.EMBED:
            return frozenset({PoolingKind.LAST, PoolingKind.FIRST, PoolingKind.MEAN, PoolingKind.TOKENS})
        return frozenset({self.kind})
