"""Makes the page of the architectures that are served, of the families themselves."""

from __future__ import annotations

import inspect

from blockyard.model_config.families import encoders
from blockyard.model_config.network import MODULES
from gateway.text.vocabulary_files import VOCABULARY_FILES


def models_page(note: str) -> str:
    """Returns the page."""
    parts = [
        f"# Models\n\n{note}\n",
        "What `architectures` of a model's config.json may name: of several the first one that stands here counts. "
        "A field of config.json that would change the numbers and is not supported is refused by its name "
        "([what is read](../guides/run.md#models)); `blockyard plan MODEL` and `blockyard doctor --model MODEL` say so "
        "before anything starts. To add one: [add a model](../guides/add-a-model.md).\n",
        "Tokenizers: "
        + ", ".join(f"`{name}`" for name in VOCABULARY_FILES)
        + "; of several files the first one in this order.\n",
    ]
    for module in (*MODULES, encoders):
        title = (inspect.getdoc(module) or "").partition("\n")[0].rstrip(".")
        rows = (f"| `{name}` | `{family.model_type}` |" for name, family in sorted(module.FAMILIES.items()))
        parts.append("\n".join([f"## {title}\n", "| `architectures` | `model_type` |", "|---|---|", *rows, ""]))
    parts.append(
        "`…ForSequenceClassification` and `…ForMaskedLM` of an encoder, and `…ForSequenceClassification` and `…Model` "
        "of a decoder, are served too where a file says what to make of their rows"
        " ([vectors, scores and labels](../guides/run.md#vectors-scores-and-labels)).\n"
    )
    return "\n".join(parts)
