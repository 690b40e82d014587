"""`blockyard generate`: continues one prompt; only the answer goes to standard output."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from blockyard.cli.connection import connection
from blockyard.client.results import GenerationOptions
from blockyard.client.targets import DEFAULT_TARGET

Target = Annotated[
    str,
    typer.Option(
        help="the gateway's gRPC address, host:port; of several, with commas between, one that answers",
        envvar="BLOCKYARD_TARGET",
    ),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads standard input")],
    target: Target = DEFAULT_TARGET,
    stream: Annotated[bool, typer.Option(help="write text as it comes")] = True,
    model: Annotated[str, typer.Option(help="the model's name; default: the only one")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="tokens to generate at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="smallest set of tokens with this probability")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="this many of the best tokens; 0 is off")] = None,
    min_p: Annotated[float | None, typer.Option(help="drop tokens below this share of the best one's")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="key of the random draws")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=64, help="continuations; more than one do not stream")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given again")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on past the model's end token")] = False,
) -> None:
    """Continue a prompt."""
    options = GenerationOptions(model=model, n=n, ignore_eos=ignore_eos, stop=stop or [])
    chosen = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    options.update({name: value for name, value in chosen.items() if value is not None})  # type: ignore[typeddict-item]
    text = sys.stdin.read() if prompt == "-" else prompt
    with connection().make_client(target) as client:
        if stream and n == 1:
            with client.stream(text, **options) as deltas:
                for delta in deltas.text_deltas():
                    typer.echo(delta, nl=False)
            typer.echo()
        else:
            for choice in client.generate(text, **options).choices:
                typer.echo(choice.text)
                if choice.error is not None:
                    typer.echo(f"choice {choice.index} failed: {choice.error}", err=True)
