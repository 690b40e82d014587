"""`blockyard embed`, `score` and `classify`: write vectors, scores or labels of texts to standard output."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from blockyard.cli.connection import connection
from blockyard.cli.generate import Target  # noqa: TC001 - typer reads it
from blockyard.client.pooling import EmbedOptions
from blockyard.client.targets import DEFAULT_TARGET

Texts = Annotated[list[str], typer.Argument(help="texts; - reads standard input, a text a line")]
Model = Annotated[str, typer.Option(help="the model's name; default: the only one")]


def embed(
    texts: Texts,
    target: Target = DEFAULT_TARGET,
    model: Model = "",
    dimensions: Annotated[int | None, typer.Option(min=1, help="the first so many numbers of each vector")] = None,
    prompt_name: Annotated[str, typer.Option(help="a prompt of the model's, put before each text")] = "",
) -> None:
    """Make a vector of each text, and write it as a line of JSON."""
    options = EmbedOptions(model=model)
    if dimensions is not None:
        options["dimensions"] = dimensions
    if prompt_name:
        options["prompt_name"] = prompt_name
    with connection().make_client(target) as client:
        for vector in client.embed(_read(texts), **options).vectors:
            typer.echo(json.dumps(list(vector)))


def score(
    query: Annotated[str, typer.Argument(help="what documents are to answer")],
    documents: Texts,
    target: Target = DEFAULT_TARGET,
    model: Model = "",
) -> None:
    """Score how well documents answer a query; each line has a score, a tab and the document, the best first."""
    given = _read(documents)
    with connection().make_client(target) as client:
        for each in client.score(query, given, model=model, top_n=len(given)).documents:
            typer.echo(f"{each.score:.6g}\t{given[each.index]}")


def classify(texts: Texts, target: Target = DEFAULT_TARGET, model: Model = "") -> None:
    """Find each text's likeliest label; each line has its probability, a tab and the label."""
    with connection().make_client(target) as client:
        for each in client.classify(_read(texts), model=model).classifications:
            typer.echo(f"{max(each.probabilities):.6g}\t{each.label}")


def _read(texts: list[str]) -> list[str]:
    return sys.stdin.read().splitlines() if texts == ["-"] else texts
