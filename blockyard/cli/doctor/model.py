"""Checks the configured model: whether it can be served, by whose code, and for which task."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.cli.doctor.findings import Finding, bad, doubtful, good
from blockyard.contract.models import parse_task
from blockyard.errors import BlockyardError
from blockyard.local.verdict import judge
from blockyard.model_config.fallback import Outline
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_files import resolve_model

# Time for an interpreter to start and to read a vocabulary.
_SECONDS = 120.0

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.configuration import SystemConfiguration


def look_at_model(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Finds the task of a model folder and the file that states it. Downloads nothing."""
    folder = Path(configuration.model.model or ".").expanduser()
    if not configuration.model.model or not folder.is_dir():
        return
    try:
        rule = read_rule(folder, parse_task(configuration.load.task))
    except BlockyardError as error:
        yield bad("task", error.message, "take a model whose files say it, or write them as sentence-transformers does")
        return
    yield good("task", "to generate" if rule is None else f"to {rule.task}, as {rule.source} says")


def look_at_template(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Checks that the tool calls of the chat template can be parsed, and which role orders it accepts.

    Runs the gateway's code in a process of its own; yields nothing if the gateway is not installed.
    """
    named, text = configuration.model, configuration.text
    folder = Path(named.model or ".").expanduser()
    if not named.model or not folder.is_dir() or find_spec("gateway") is None:
        return
    program = [sys.executable, "-m", "gateway.text.round_trip", str(folder), text.chat_template, text.dialect]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        yield bad("dialect", reason, "name another --dialect, or look at the tokenizer's files")
        return
    dialect, problem, changes = (json.loads(done.stdout)[key] for key in ("dialect", "problem", "roles"))
    advice = "name the right --dialect, or take its answers as text: docs/guides/tools.md"
    if problem:
        yield doubtful("dialect", f"{dialect or 'none'}: {problem}", advice)
    elif not dialect:
        yield doubtful("dialect", "its chat template shows no form of calls of tools that is known", advice)
    else:
        yield good("dialect", f"{dialect}: calls of tools that its chat template writes come out again")
    if changes is not None:
        yield good("roles", changes or "its chat template takes system messages and turns in every order")


def look_at_code(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Checks that the model can be served, and whether Blockyard's or transformers' code computes it."""
    named = configuration.model
    if not named.model:
        return
    try:
        verdict = judge(resolve_model(named.model, named.revision, "config"), configuration)
    except BlockyardError as error:
        yield bad("model", error.message, "see docs/reference/models.md for what is served")
        return
    model = verdict.model
    if model is None or verdict.refusal:
        yield bad("model", verdict.refusal, "take another model: docs/reference/models.md lists what is served")
    elif isinstance(model, Outline):
        advice = "expect less speed, and look at batch_invariant; its memory is known once it is loaded"
        yield doubtful("model", f"{model.architecture}: {'; '.join(model.remarks)}", advice)
    else:
        weights = f", its weights quantized ({model.stored.title})" if model.stored else ""
        yield good("model", "; ".join([f"{model.architecture} is served, {model.dtype_name}{weights}", *model.remarks]))
