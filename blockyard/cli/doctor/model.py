"""Looks at the model that the settings name: whether it is served, by whose code, and for what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.cli.doctor.findings import Finding, bad, doubtful, good
from blockyard.errors import BlockyardError
from blockyard.local.model_check import read_model
from blockyard.model_config.fallback import Outline
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.configuration import SystemConfiguration


def look_at_model(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds whether a folder's model is served, what for, and which file says so. Nothing is downloaded to find it."""
    folder = Path(configuration.model.model or ".").expanduser()
    if not configuration.model.model or not folder.is_dir():
        return
    try:
        rule = read_rule(folder)
    except BlockyardError as error:
        yield bad("task", error.message, "take a model whose files say it, or write them as sentence-transformers does")
        return
    yield good("task", "to generate" if rule is None else f"to {rule.task}, as {rule.source} says")


def look_at_code(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds whose code computes the model."""
    named = configuration.model
    if not named.model:
        return
    try:
        model = read_model(resolve_model(named.model, named.revision, "config"), configuration)
    except BlockyardError as error:
        yield bad("model", error.message, "see docs/reference/models.md for what is served")
        return
    if isinstance(model, Outline):
        advice = "expect less speed, and look at batch_invariant; its memory is known once it is loaded"
        yield doubtful("model", f"{model.architecture}: {'; '.join(model.remarks)}", advice)
    else:
        yield good("model", f"{model.architecture} is served, {model.dtype_name}")
