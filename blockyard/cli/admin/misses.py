"""`blockyard admin misses`: tells which prompts were computed again although earlier ones began alike, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, admin_api, as_json
from blockyard.cli.admin.tables import make_console, make_table
from blockyard.cli.connection import with_connection
from blockyard.cli.top.readings import seconds
from blockyard.cli.units import span

# The comparison of the longest history takes a second.
COMPARE_SECONDS = 60.0
CAUSES = {
    admin_pb2.MISS_CAUSE_PARTED: "differs from {earlier} from token {position} on",
    admin_pb2.MISS_CAUSE_NOT_KEPT: "{common} tokens of {earlier} were not in the cache any more",
    admin_pb2.MISS_CAUSE_AT_ONCE: "{earlier} was still being computed",
    admin_pb2.MISS_CAUSE_OTHER_TENANT: "{common} tokens are those of {earlier}, which is another tenant's",
    admin_pb2.MISS_CAUSE_OTHER_SALT: "{common} tokens are those of {earlier}, which has another cache_salt",
    admin_pb2.MISS_CAUSE_OTHER_ADAPTER: "{common} tokens are those of {earlier}, which has another adapter",
    admin_pb2.MISS_CAUSE_WHOLE_PROMPT: "it asks for rows of the whole prompt",
}


@with_connection
def misses(
    request: Annotated[str, typer.Argument(help="a request's id, or its beginning; default: all")] = "",
    tenant: Annotated[str, typer.Option(help="requests of this tenant only")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="how many to show, the last ones first")] = 20,
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    json: AsJson = False,
) -> None:
    """Show whose prompts were computed again, and why.

    Compares the prompts of the gateway's last requests (--prompt-history) with those before them. The text at which two
    prompts part is shown by a gateway with --show-prompt-text.
    """
    asked = admin_pb2.ListMissesRequest(tenant=tenant, request_id=request, max_misses=limit)
    with admin_api(address) as api:
        answer = api.ask(api.stub.ListMisses, asked, COMPARE_SECONDS)
    if json:
        typer.echo(as_json(answer))
        return
    console = make_console()
    if answer.misses:
        table = make_table("ago", "request", "tenant", "prompt", "cached", "why", numbers=("prompt", "cached"))
        for miss in answer.misses:
            counts = (f"{miss.num_prompt_tokens:,}", f"{miss.num_cached_tokens:,}")
            age = span(seconds(miss.request.age))
            table.add_row(age, miss.request.request_id, miss.request.tenant, *counts, _explain(miss))
        console.print(table)
        console.print()
    share = answer.num_cached_tokens / max(answer.num_prompt_tokens, 1)
    typer.echo(
        f"{answer.num_prompts:,} requests with {answer.num_prompt_tokens:,} prompt tokens, {share:.0%} of them cached; "
        f"{answer.num_misses:,} of the requests computed tokens again"
    )


def _explain(miss: admin_pb2.PromptMiss) -> Text:
    common = miss.num_common_tokens
    names = {"earlier": miss.earlier.request_id, "common": f"{common:,}", "position": f"{common:,}"}
    told = Text(CAUSES.get(miss.cause, "for a reason that this version does not know").format(**names))
    if miss.text or miss.earlier_text:
        told.append(f"\nafter {miss.common_text!r}\n", style="dim")
        told.append(f"it has {miss.text!r}, the earlier one {miss.earlier_text!r}")
    return told
