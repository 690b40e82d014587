"""`blockyard pull`, `ls`, `show` and `rm`: the models of the hub's cache, and whether they can be served."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blockyard.capacity.replica_plan import plan_replica
from blockyard.capacity.weights import count_elements
from blockyard.cli.admin.tables import make_table
from blockyard.cli.progress import StartBars, download
from blockyard.cli.system_settings import DEMO, Model, resolve_system
from blockyard.cli.units import count, size, span
from blockyard.contract.parallel import ParallelSizes
from blockyard.errors import BlockyardError, Reason
from blockyard.local.hardware import find_hardware
from blockyard.local.hub_cache import CachedModel, delete_model, list_models
from blockyard.local.registry import list_systems
from blockyard.local.verdict import judge
from blockyard.model_config.fallback import Outline
from blockyard.model_files import DEMO_FOLDER, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.configuration import SystemConfiguration
    from blockyard.local.verdict import Verdict

# The width of a table that is written to a file or a pipe.
_PLAIN_WIDTH = 200

HubId = Annotated[str, typer.Argument(metavar="MODEL", help="a hub id: owner/name", show_default=False)]
Revision = Annotated[str, typer.Option(help="branch, tag or commit of a hub id")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def pull(model: HubId, revision: Revision = "main") -> None:
    """Download a model's files into the hub's cache, if it can be served. Goes on where an earlier download stopped."""
    configuration = resolve_system(model, "", {"revision": revision})
    folder = resolve_model(configuration.model.model, revision, "config")
    verdict = judge(folder, configuration)
    if verdict.refusal:
        raise BlockyardError(
            Reason.MODEL_NOT_LOADED, f"{model} is not downloaded, since it cannot be served: {verdict.refusal}"
        )
    with StartBars() as bars:
        download([configuration], bars)
    typer.echo(f"{model} is here: {size(_folder_size(folder))}, {_describe_code(verdict)}")


def ls(as_json: AsJson = False) -> None:
    """List the models on this machine: the demo model and those in the hub's cache."""
    configuration = resolve_system("", "", {})
    rows: list[dict[str, Any]] = []
    for cached in [_demo(), *list_models()]:
        verdict = judge(cached.folder, configuration, tries=False)
        refusal = verdict.refusal
        if not refusal and not cached.has_weights:
            refusal = f"its weights are not here: blockyard pull {cached.name}"
        architecture = verdict.model.architecture if verdict.model else _read_architecture(cached.folder)
        row = {"name": cached.name, "size_bytes": cached.size_bytes, "architecture": architecture, "refusal": refusal}
        rows.append({**row, "code": "transformers" if verdict.by_transformers else "blockyard", "used": cached.used})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = make_table("name", "size", "architecture", "used", "served", numbers=("size",))
    for row in rows:
        by = " by transformers' code" if row["code"] == "transformers" else ""
        served = f"no: {row['refusal']}" if row["refusal"] else f"yes{by}"
        used = f"{span(max(0.0, time.time() - row['used']))} ago" if row["used"] else ""
        table.add_row(row["name"], size(row["size_bytes"]), row["architecture"], used, served)
    _console().print(table, markup=False)


def show(model: Model = "", revision: Revision = "main", as_json: AsJson = False) -> None:
    """Show a model: its files, its sizes, whether it can be served here, and why not.

    Of a hub's model that is not here, config.json is downloaded. Exits with 1 if it cannot be served.
    """
    configuration = resolve_system(model, "", {"revision": revision})
    folder = resolve_model(configuration.model.model, revision, "config")
    facts = _collect_facts(folder, judge(folder, configuration), configuration)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), str(value))
        _console().print(table, markup=False, highlight=False)
    if facts["served"] != "yes":
        raise typer.Exit(1)


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="hub ids, as `blockyard ls` names them")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Delete models from the hub's cache, with all their revisions."""
    cached = {model.name: model for model in list_models()}
    in_use = {entry.model: entry.name for entry in list_systems()}
    for name in models:
        if name not in cached:
            raise typer.BadParameter(f"{name} is not in the hub's cache: see `blockyard ls`", param_hint="MODEL")
        if name in in_use:
            raise typer.BadParameter(f"the system {in_use[name]} serves {name}: stop it first", param_hint="MODEL")
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("say --yes: standard input is no terminal to ask on", param_hint="--yes")
    for name in models:
        if yes or typer.confirm(f"delete {name}, {size(cached[name].size_bytes)}?"):
            typer.echo(f"deleted {name}: {size(delete_model(cached[name]))} are free again")


def _demo() -> CachedModel:
    return CachedModel(DEMO, DEMO_FOLDER, _folder_size(DEMO_FOLDER), 0.0, ())


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _read_architecture(folder: Path) -> str:
    """Returns the architecture that config.json names; empty: none can be read."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return str(names[0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _describe_code(verdict: Verdict) -> str:
    assert verdict.model is not None
    return f"{verdict.model.architecture}, served" + (" by transformers' code" if verdict.by_transformers else "")


def _collect_facts(folder: Path, verdict: Verdict, configuration: SystemConfiguration) -> dict[str, Any]:
    model = verdict.model
    facts: dict[str, Any] = {
        "model": configuration.model.model or DEMO,
        "folder": str(folder),
        "files": f"{sum(path.is_file() for path in folder.iterdir())}, {size(_folder_size(folder))}",
        "weights": "here" if any(folder.glob("*.safetensors")) else "not here",
        "architecture": model.architecture if model else _read_architecture(folder),
    }
    if model is not None:
        facts["dtype"] = model.dtype_name
    if model is not None and not isinstance(model, Outline):
        stored = f", its weights quantized ({model.stored.title})" if model.stored else ""
        facts["dtype"] += stored
        facts["parameters"] = count(count_elements(model))
        facts["length"] = f"up to {model.max_model_len} tokens"
        facts["task"] = f"to {model.task.value}" if model.task.pools else "to generate"
        facts["memory"] = _describe_memory(model, configuration)
    if model is not None and model.remarks:
        facts["remarks"] = "; ".join(model.remarks)
    facts["code"] = "transformers" if verdict.by_transformers else "blockyard"
    facts["served"] = f"no: {verdict.refusal}" if verdict.refusal else "yes"
    return facts


def _describe_memory(model: Any, configuration: SystemConfiguration) -> str:
    hardware = find_hardware(configuration.device)
    planned = plan_replica(model, configuration, hardware, ParallelSizes(1, 1))
    if planned.refusal or not planned.ranks:
        return planned.refusal
    weights = size(planned.tightest.memory.weights_bytes)
    return f"{weights} of weights, and room for {planned.num_tokens:,} tokens ({hardware.name}); see `blockyard plan`"


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
