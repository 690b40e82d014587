"""What a model is served for: the contract's `Task`, as a value that knows no generated code."""

from __future__ import annotations

from enum import IntEnum


class Task(IntEnum):
    """What a model is served for, with the contract's numbers. UNSPECIFIED: nobody says, so it generates."""

    UNSPECIFIED = 0
    GENERATE = 1
    EMBED = 2
    CLASSIFY = 3
    SCORE = 4

    @property
    def label(self) -> str:
        """Its name in settings."""
        return self.name.lower()

    @property
    def pools(self) -> bool:
        """Whether numbers are made of prompts, and no tokens."""
        return self in (Task.EMBED, Task.CLASSIFY, Task.SCORE)


TASKS = ("auto", *(task.label for task in Task if task))
"""The names of `--task`; auto: as the model's files say."""


def find_task(number: int) -> Task:
    """Finds a task by its number; one of a newer peer has no name here, and is unspecified."""
    return next((task for task in Task if task == number), Task.UNSPECIFIED)


def parse_task(name: str) -> Task:
    """Returns the task of a setting's name."""
    return Task.UNSPECIFIED if name == "auto" else Task[name.upper()]
