"""Refuses models that need their own code: code that comes with a model is never run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.model_config.fields import Fields

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
