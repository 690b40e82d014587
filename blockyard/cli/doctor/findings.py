"""What was found: how well it is, in words, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How well something is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Level
    text: str
    advice: str = ""
    """What to do, where it is not ok."""


def good(subject: str, text: str) -> Finding:
    """Makes one of what is as it should be."""
    return Finding(subject, Level.OK, text)


def doubtful(subject: str, text: str, advice: str) -> Finding:
    """Makes one of what works, and not well."""
    return Finding(subject, Level.WARN, text, advice)


def bad(subject: str, text: str, advice: str) -> Finding:
    """Makes one of what keeps the system from serving."""
    return Finding(subject, Level.FAIL, text, advice)
