"""Looks at the model that the settings name: whether it is served, by whose code, and for what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.capacity.replica_plan import check_network
from blockyard.cli.doctor.findings import Finding, bad, doubtful, good
from blockyard.errors import BlockyardError
from blockyard.local.hardware import find_hardware
from blockyard.local.model_check import read_model, task_of
from blockyard.local.model_trial import find_refusal
from blockyard.model_config.fallback import Outline
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_files import resolve_model
from blockyard.parallel import Parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.configuration import SystemConfiguration


def look_at_model(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds whether a folder's model is served, what for, and which file says so. Nothing is downloaded to find it."""
    folder = Path(configuration.model.model or ".").expanduser()
    if not configuration.model.model or not folder.is_dir():
        return
    try:
        rule = read_rule(folder, task_of(configuration))
    except BlockyardError as error:
        yield bad("task", error.message, "take a model whose files say it, or write them as sentence-transformers does")
        return
    yield good("task", "to generate" if rule is None else f"to {rule.task}, as {rule.source} says")


def look_at_code(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds whose code computes the model."""
    named = configuration.model
    if not named.model:
        return
    parallel, device = configuration.parallel, configuration.device
    sizes = Parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    try:
        folder = resolve_model(named.model, named.revision, "config")
        model = read_model(folder, configuration)
        refusal = find_refusal(folder, device.dtype) if isinstance(model, Outline) else ""
        if not isinstance(model, Outline):
            check_network(model, configuration, find_hardware(device), sizes)
    except BlockyardError as error:
        yield bad("model", error.message, "see docs/reference/models.md for what is served")
        return
    if isinstance(model, Outline) and refusal:
        yield bad("model", refusal, "take another model: docs/reference/models.md lists what is served")
    elif isinstance(model, Outline):
        advice = "expect less speed, and look at batch_invariant; its memory is known once it is loaded"
        yield doubtful("model", f"{model.architecture}: {'; '.join(model.remarks)}", advice)
    else:
        weights = f", its weights quantized ({model.stored.title})" if model.stored else ""
        yield good("model", "; ".join([f"{model.architecture} is served, {model.dtype_name}{weights}", *model.remarks]))
