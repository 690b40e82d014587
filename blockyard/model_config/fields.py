"""Reads fields of config.json by name, checks their types, and collects all violations.

A getter that finds a violation records it and returns a stand-in, so that one pass finds all violations.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from blockyard.errors import BlockyardError, Reason, Violation
from blockyard.paths import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


T = TypeVar("T")

FIELDS = ("auto_map", "trust_remote_code")


def asks_for_own_code(values: Mapping[str, object], file: str = "config.json") -> str:
    """Returns the refusal of a model file that asks for the model's own code; empty: it does not ask for it."""
    name = next((name for name in FIELDS if values.get(name)), "")
    if not name:
        return ""
    return (
        f"{file} has {name}: it asks for code that comes with the model, and such code is never run "
        f"(take it out if the model's architecture and tokenizer are built in)"
    )


def refuse_own_code(fields: Fields) -> None:
    """Records a violation if config.json asks for the model's own code."""
    for name in FIELDS:
        if fields.get(name):
            fields.refuse(name, asks_for_own_code({name: True}))


# Messages carry sizes in 32 bits; no network comes near.
MAX_SIZE = 2**31 - 1


def unusable(message: str, violations: tuple[Violation, ...] = ()) -> BlockyardError:
    """Creates the error of a model that cannot be loaded; the message says what to do."""
    return BlockyardError(Reason.MODEL_NOT_LOADED, message, violations)


def read_object(path: Path, root: Path | None = None) -> dict[str, Any]:
    """Reads a JSON object from a file; raises BlockyardError MODEL_NOT_LOADED. `root`: as for `open_file`."""
    try:
        value: object = json.loads(read_file(path, root).decode())
    except FileNotFoundError:
        raise unusable(f"{path.parent} has no {path.name}: give the folder of a model, or a hub id") from None
    except OSError as error:
        raise unusable(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise unusable(f"{path} is not valid JSON (line {error.lineno}): download it again") from None
    except (ValueError, RecursionError):
        raise unusable(f"{path} is not valid JSON: download it again") from None
    if not isinstance(value, dict):
        raise unusable(f"{path} is not a JSON object: download it again")
    return cast("dict[str, Any]", value)


@dataclass(slots=True)
class Fields:
    """The fields of a JSON object. A null field counts as missing, unless a getter says otherwise."""

    values: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps the usual names of fields to those in this file, if they differ."""
    violations: list[Violation] = field(default_factory=list[Violation])
    """Reasons why the model cannot be served, one sentence each."""
    remarks: list[str] = field(default_factory=list[str])
    """Sentences that users should know about a model that is served."""
    read: set[str] = field(default_factory=set[str])
    """The fields that were read, under their names in this file."""

    def name_of(self, name: str) -> str:
        return self.renamed.get(name, name)

    def refuse(self, name: str, sentence: str) -> None:
        self.violations.append(Violation(self.name_of(name), sentence, Reason.MODEL_NOT_LOADED))

    def refuse_other_name(self, name: str) -> None:
        """Records a violation: the field has its usual name, but this architecture uses another name for it."""
        sentence = f"config.json: {name} is called {self.name_of(name)} in a model of this architecture"
        self.violations.append(Violation(name, sentence, Reason.MODEL_NOT_LOADED))

    def has(self, name: str) -> bool:
        """Returns whether a field is present, null or not."""
        name = self.name_of(name)
        self.read.add(name)
        return name in self.values

    def get(self, name: str) -> Any:
        """Returns a field's raw value; None if it is missing."""
        name = self.name_of(name)
        self.read.add(name)
        return self.values.get(name)

    def choose(self, name: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Reads a text that must be a key of `choices`; returns the choice's value."""
        first = next(iter(choices))
        value = self.get(name)
        if value is None and default is not None:
            value = default
        if not isinstance(value, str) or value not in choices:
            supported = ", ".join(choices)
            self.refuse(name, f"config.json: {self.name_of(name)} is {value!r}, not supported (supported: {supported})")
            return choices[first]
        return choices[value]

    def require(self, name: str, *neutral: Any) -> None:
        """Refuses a field whose value is neither null nor one of `neutral`."""
        value = self.get(name)
        if value is not None and value not in neutral:
            self.refuse(name, f"config.json: {self.name_of(name)} is {_short(value)}, which is not supported")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int | None = MAX_SIZE) -> int:
        """Reads an integer; refuses a missing field without a default."""
        value, name = self.get(name), self.name_of(name)
        if value is None:
            if default is None:
                self.refuse(name, f"config.json has no {name}: is this a model of a supported architecture?")
            return least if default is None else default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
            self.refuse(name, f"config.json: {name} must be {kind}, not {value!r}")
            return least
        if most is not None and value > most:
            self.refuse(name, f"config.json: {name} is {value}, more than {most}")
            return least
        return value

    def number(self, name: str, default: float, *, above: float | None = None) -> float:
        """Reads a finite number, greater than `above`."""
        value, name = self.get(name), self.name_of(name)
        if value is None:
            return default
        if not is_number(value) or (above is not None and value <= above):
            wanted = "a number" if above is None else f"a number above {above:g}"
            self.refuse(name, f"config.json: {name} must be {wanted}, not {value!r}")
            return default
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Reads true or false; null is false."""
        if not self.has(name):
            return default
        value, name = self.get(name), self.name_of(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"config.json: {name} must be true or false, not {value!r}")
            return False
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """Reads a string; refuses another type."""
        value, name = self.get(name), self.name_of(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"config.json: {name} must be a text, not {value!r}")
            return default
        return default if value is None else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def is_number(value: object) -> bool:
    """Returns whether a JSON value is a finite number; true and false are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
