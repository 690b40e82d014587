"""Reads a model's vocabulary for llguidance: the bytes of each token, as a trie. Knows no grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import HINT, library_version
from blockyard.model_config.fields import read_object
from blockyard.panics import ExtensionPanic, panics_as_errors

if TYPE_CHECKING:
    from pathlib import Path

    from llguidance import LLTokenizer


def read_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer:
    """Reads tokenizer.json. Ids that only the tokenizer or only the model has are never allowed.

    Raises BlockyardError FEATURE_DISABLED, which names the missing file or feature.
    """
    if not library_version():
        raise _disabled(f"this worker cannot compile grammars: {HINT}")
    from llguidance import LLTokenizer  # noqa: PLC0415  an extra

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise _disabled(f"grammars need the model's tokenizer.json, and {folder} on the worker has none")
    ends = sorted(token_id for token_id in _end_ids(folder) if token_id < vocab_size)
    problem = None
    # The tokenizer may have more ids than the model, and the model may have end tokens that the tokenizer lacks.
    for n_vocab, eos_token in ((vocab_size, ends or None), (None, ends or None), (vocab_size, None), (None, None)):
        try:
            with panics_as_errors():
                return LLTokenizer(str(file), n_vocab=n_vocab, eos_token=eos_token)
        except (ValueError, ExtensionPanic) as error:
            problem = error
    raise _disabled(f"{file} cannot be used for grammars: {problem}")


def _end_ids(folder: Path) -> set[int]:
    """Returns the end token ids in config.json and generation_config.json; llguidance needs at least one."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_object(folder / name).get("eos_token_id") if (folder / name).exists() else None
        ids = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)
    return found


def _disabled(message: str) -> BlockyardError:
    return BlockyardError(Reason.FEATURE_DISABLED, message)
