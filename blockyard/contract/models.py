"""The task of a model, and the models that a gateway lists."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Task(StrEnum):
    """The task that a model is served for. UNSPECIFIED: as its files say, or not known."""

    UNSPECIFIED = "unspecified"
    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"

    @property
    def pools(self) -> bool:
        """Whether the model turns prompts into vectors, scores or labels instead of generating tokens."""
        return self in (Task.EMBED, Task.CLASSIFY, Task.SCORE)


TASKS = ("auto", *(task.value for task in Task if task is not Task.UNSPECIFIED))
"""The names of `--task`; auto: as the model's files say."""


def parse_task(name: str) -> Task:
    """Returns the task of a `--task` value; auto is UNSPECIFIED."""
    return Task.UNSPECIFIED if name == "auto" else Task(name)


class LoadState(IntEnum):
    """Whether a model of a gateway is loaded. Names and numbers are those of ModelState in the admin API."""

    READY = 1
    LOADING = 2
    UNLOADED = 3
    FAILED = 4
    NOT_READY = 5


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served, or an adapter of the model `parent`."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool
    parent: str = ""
    task: Task = Task.UNSPECIFIED
    """The task that the model is served for; its value is its name: "generate", "embed", "classify" or "score"."""
    embedding_size: int = 0
    """Length of the model's vectors; 0: it makes no vectors, or its files do not say."""
    warnings: tuple[str, ...] = ()
    """Warnings for users of the model, a sentence each."""
    dialect: str = ""
    """Format of the model's tool calls and reasoning; empty: not known, answers are plain text."""
