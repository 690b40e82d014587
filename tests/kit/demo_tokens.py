"""Gives the demo model tokens that other models have, such as those around reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
THINK_ID, END_ID = 4094, 4095
VOCAB_SIZE = 4096


def write_demo_with(folder: Path, tokens: Sequence[str]) -> Path:
    """Copies the demo model to a folder. Its last pieces become these tokens, which are added and not special."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "README.md"))
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    model, first = described["model"], VOCAB_SIZE - len(tokens)
    for piece in [piece for piece, token_id in model["vocab"].items() if token_id >= first]:
        del model["vocab"][piece]
        model["merges"] = [merge for merge in model["merges"] if "".join(merge) != piece]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    described["added_tokens"] += [{"id": first + n, "content": text, **plain} for n, text in enumerate(tokens)]
    file.write_text(json.dumps(described), encoding="utf-8")
    return folder


def write_thinking_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes a demo model with the tokens `<think>` and `</think>`, as Qwen3 has them."""
    write_demo_with(folder, ("<think>", "</think>"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    return folder
