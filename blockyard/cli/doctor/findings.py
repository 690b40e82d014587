"""What was found: how well it is, in words, and what to do about it."""

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


def good(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def doubtful(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, Level.WARN, text, advice)


def bad(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, Level.FAIL, text, advice)
