"""`blockyard keys`: makes, lists and revokes API keys in a file that the gateway reads."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from blockyard.cli.help import App
from blockyard.headers import TENANT_PATTERN
from blockyard.security.keys import ANY_TENANT, Key, KeyRole, add_key, digest, make_secret, read_keys, revoke_key

app = App(help="Make, list and revoke the keys of a server.")

File = Annotated[
    Path, typer.Option(dir_okay=False, help="the file of keys, as --api-keys-file", envvar="BLOCKYARD_API_KEYS_FILE")
]
Name = Annotated[str, typer.Argument(help="1 to 64 of A-Z a-z 0-9 . _ -")]
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


@app.command()
def make(
    name: Name,
    file: File,
    tenant: Annotated[
        str, typer.Option(help="on whose behalf its calls are; * lets each call say; default: the name")
    ] = "",
    role: Annotated[
        KeyRole, typer.Option(help="user: the APIs; admin: the admin API; monitor: metrics")
    ] = KeyRole.USER,
    expires: Annotated[str, typer.Option(help="when it ends: 90d, 12h, or 2030-01-31; default: never")] = "",
    max_calls: Annotated[int, typer.Option(min=0, help="calls at once, at each gateway; 0: no limit")] = 0,
) -> None:
    """Make a key: it is printed, this once, and its hash goes into the file."""
    tenant = tenant or name
    for option, value in (("NAME", name), ("--tenant", tenant)):
        if not re.fullmatch(TENANT_PATTERN, value) and (option, value) != ("--tenant", ANY_TENANT):
            raise typer.BadParameter(
                f"must be 1 to 64 characters of A-Z a-z 0-9 . _ -, not {value!r}", param_hint=option
            )
    secret = make_secret()
    entry = Key(
        name=name, sha256=digest(secret), tenant=tenant, role=role, expires=_moment(expires), max_calls=max_calls
    )
    add_key(file, entry)
    typer.echo(secret)
    typer.echo(f"{name} is in {file} now; the key itself is nowhere but above", err=True)


def _moment(text: str) -> datetime | None:
    if not text:
        return None
    if match := re.fullmatch(r"(\d{1,5})([mhd])", text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a time from now (90d, 12h) nor a date", param_hint="--expires"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@app.command("list")
def list_keys(file: File) -> None:
    """List the keys of a file."""
    table = Table("name", "role", "tenant", "expires", "calls at once", box=None, pad_edge=False)
    for key in read_keys(file):
        ends = key.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") if key.expires else "never"
        ends = f"{ends} (expired)" if key.is_expired(time.time()) else ends
        table.add_row(key.name, key.role, key.tenant, ends, str(key.max_calls or "any"))
    Console().print(table)


@app.command()
def revoke(name: Name, file: File) -> None:
    """Remove a key from a file: within a second its calls are refused."""
    revoke_key(file, name)
    typer.echo(f"{name} is not in {file} any more", err=True)
