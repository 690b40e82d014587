"""`blockyard lora`: loads, unloads, pins and lists adapters, over a gateway's admin port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, admin_api, as_json, read_model
from blockyard.cli.admin.tables import make_table
from blockyard.cli.connection import with_connection
from blockyard.cli.help import App
from blockyard.cli.units import size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

app = App(help="Load and unload adapters (LoRA, soft prompts) of a running system: over a gateway's admin port.")
app.set_options(read_model)

# Workers read gigabytes at most, from a disk or over a network.
LOAD_SECONDS = 150.0
_DIGITS = 12

Name = Annotated[str, typer.Argument(help="the adapter's name, which requests have as their model")]


@app.command()
@with_connection
def load(
    name: Name,
    path: Annotated[str, typer.Argument(help="its folder on the workers' machines, or below --lora-root")],
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="take the place of one with this name; running requests keep theirs")
    ] = False,
    json: AsJson = False,
) -> None:
    """Load an adapter at all replicas."""
    with admin_api(address) as api:
        request = admin_pb2.LoadLoraRequest(name=name, path=path, load_inplace=in_place)
        answer = api.ask(api.stub.LoadLora, request, LOAD_SECONDS)
    lora = answer.lora
    typer.echo(as_json(answer) if json else f"{lora.name} is loaded: {_kind(lora)}, {size(lora.num_bytes)}")


@app.command()
@with_connection
def unload(name: Name, address: AdminAddress = DEFAULT_ADMIN_ADDRESS, json: AsJson = False) -> None:
    """Unload an adapter: new requests cannot name it, running requests go on with it."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.UnloadLora, admin_pb2.UnloadLoraRequest(name=name))
    typer.echo(as_json(answer) if json else f"{name} is unloaded")


@app.command()
@with_connection
def pin(
    name: Name,
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    off: Annotated[bool, typer.Option("--off", help="no longer")] = False,
    json: AsJson = False,
) -> None:
    """Keep an adapter in the workers' memory, however seldom it is used."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.PinLora, admin_pb2.PinLoraRequest(name=name, pinned=not off))
    typer.echo(as_json(answer) if json else f"{name} is {'no longer ' * off}pinned")


@app.command("list")
@with_connection
def list_loras(address: AdminAddress = DEFAULT_ADMIN_ADDRESS, json: AsJson = False) -> None:
    """List the adapters, and at which replicas they are."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.ListLoras, admin_pb2.ListLorasRequest())
    if json:
        typer.echo(as_json(answer))
    else:
        Console().print(_table(answer.loras))


def _table(loras: Iterable[admin_pb2.LoraStatus]) -> Table:
    table = make_table("adapter", "kind", "size", "digest", "loaded", "in slots", "pinned", numbers=("size",))
    for lora in loras:
        table.add_row(
            lora.name,
            _kind(lora),
            size(lora.num_bytes) if lora.num_bytes else "",
            lora.digest[:_DIGITS],
            _numbers(lora.loaded_replica_ids),
            _numbers(lora.resident_replica_ids),
            "yes" if lora.pinned else "",
        )
    return table


def _kind(lora: admin_pb2.LoraStatus) -> str:
    if lora.num_virtual_tokens:
        return f"{lora.num_virtual_tokens} tokens"
    return f"rank {lora.rank}" if lora.rank else ""


def _numbers(replica_ids: Iterable[int]) -> str:
    return ",".join(map(str, replica_ids)) or "-"
