"""Looks at the model's files: what they say that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.cli.doctor.findings import Finding, bad, good
from blockyard.errors import BlockyardError
from blockyard.model_config.pooling.reading import read_rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.configuration import SystemConfiguration


def look_at_model(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds what a folder's model is served for, and which file says so. Nothing is downloaded to find it."""
    folder = Path(configuration.model.model or ".").expanduser()
    if not configuration.model.model or not folder.is_dir():
        return
    try:
        rule = read_rule(folder)
    except BlockyardError as error:
        yield bad("task", error.message, "take a model whose files say it, or write them as sentence-transformers does")
        return
    yield good("task", "to generate" if rule is None else f"to {rule.task}, as {rule.source} says")
