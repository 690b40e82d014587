"""The findings of `blockyard doctor`: a level, a text and advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    level: Level
    text: str
    advice: str = ""
    """What to do if the level is not OK."""


def good(subject: str, text: str) -> Finding:
    """Creates a finding of something in order."""
    return Finding(subject, Level.OK, text)


def doubtful(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, Level.WARN, text, advice)


def bad(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, Level.FAIL, text, advice)
