"""Finds a model's files: a folder, a hub id, or the demo model. Knows nothing of what the files mean.

Standard library only, unless a hub id is asked for: then the optional `huggingface_hub` downloads what is needed, into
its cache, as its environment variables say (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.paths import check_path, read_file

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLE_PIECES = 64
PIECE_BYTES = 1024

Kind = Literal["weights", "tokenizer", "config"]

_REPOSITORY, _PACKAGE = (Path(__file__).resolve().parents[1] / "models" / "demo", Path(__file__).parent / "demo_model")
DEMO_FOLDER = _REPOSITORY if _REPOSITORY.is_dir() else _PACKAGE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_FILES = ("config.json", "generation_config.json")
# Files that sentence-transformers writes beside them. Its modules have folders of their own: "1_Pooling".
_POOLING_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]*_*/config.json",
)
_PATTERNS: dict[Kind, tuple[str, ...]] = {
    "config": (*_CONFIG_FILES, *_POOLING_FILES),
    "tokenizer": (
        *_CONFIG_FILES,
        *_POOLING_FILES,
        "tokenizer*.json",
        "tokenizer.model",
        "tekken.json",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    ),
    # Grammars of answers are followed by tokens: a worker has to know what these spell.
    "weights": (*_CONFIG_FILES, *_POOLING_FILES, "tokenizer.json", "*.safetensors", "*.safetensors.index.json"),
}
# The same weights once more, under other names or of other steps. Nothing is read from folders.
_DUPLICATES = ("[!0-9]*/*", "*/*/*", "consolidated*")


def resolve_model(model: str, revision: str, kind: Kind) -> Path:
    """Finds the folder that holds a model's files, downloading them if need be.

    Args:
        model: a folder, a hub id (`owner/name`), or empty for the demo model.
        revision: for a hub id, a branch, tag or commit; empty: the main branch.
        kind: which files are needed; a folder is taken as it is.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with a message that says what to do; FIELD_INVALID for a model or a revision
            that is longer than a path can be.
    """
    if revision:
        check_revision(revision)
    if not model:
        return _check(
            DEMO_FOLDER,
            "the demo model is not here: it comes with the repository and the wheel; pass --model",
        )
    check_path("model", model)
    try:
        folder = Path(model).expanduser()
    except RuntimeError:
        raise _unusable(
            f"{model} begins with the name of a user whom this machine does not have: check the path"
        ) from None
    # Unlike those of Path these answer for what may not be looked at, too.
    if os.path.isdir(folder):
        return _check(folder, f"{folder} has no config.json: give the folder of a model, or a hub id")
    if os.path.exists(folder):
        raise _unusable(f"{folder} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise _unusable(f"{model} is no folder on this machine: {_suggestion(folder) or 'check the path'}")
    return _check(_download(model, revision or "main", kind), f"{model} has no config.json: it is not a language model")


def check_revision(revision: str) -> None:
    """Raises BlockyardError FIELD_INVALID for what is no branch, tag or commit, such as a way out of the cache."""
    check_path("revision", revision)
    if Path(revision).is_absolute() or ".." in Path(revision).parts:
        raise invalid([Violation("revision", "must be a branch, a tag or a commit")])


def find_companions(folder: Path) -> list[Path]:
    """Finds the files that belong to a model beside its weights: its configuration and its tokenizer."""
    patterns = [pattern for pattern in _PATTERNS["tokenizer"] if "/" not in pattern]
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def model_digest(folder: Path) -> str:
    """Hashes a model's config.json: SHA-256, in hex.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, where there is none.
    """
    _check(folder, f"{folder} has no config.json")
    try:
        return hashlib.sha256(read_file(folder / "config.json")).hexdigest()
    except OSError as error:
        raise _unusable(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None


def tensor_digest(name: str, shape: Sequence[int], stored_dtype: str, content: memoryview) -> bytes:
    """Hashes a tensor as it is stored: its head, and up to 64 KiB of its bytes.

    Args:
        name: of the tensor.
        shape: its sizes.
        stored_dtype: as safetensors names it.
        content: all its bytes.

    Returns:
        SHA-256 of a line with the first three, and of the bytes: all of them, or 64 pieces of 1 KiB at even distances.
    """
    digest = hashlib.sha256(f"{name} {list(shape)} {stored_dtype}\n".encode())
    if content.nbytes <= SAMPLE_PIECES * PIECE_BYTES:
        digest.update(content)
    else:
        for piece in range(SAMPLE_PIECES):
            start = piece * (content.nbytes - PIECE_BYTES) // (SAMPLE_PIECES - 1)
            digest.update(content[start : start + PIECE_BYTES])
    return digest.digest()


def _check(folder: Path, complaint: str) -> Path:
    if not os.path.isfile(folder / "config.json"):
        raise _unusable(complaint)
    return folder


def _download(model: str, revision: str, kind: Kind) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download  # noqa: PLC0415  an optional feature
        from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415
    except ImportError:
        raise _unusable(
            f"{model} is no folder on this machine, and hub ids need the package huggingface_hub: "
            "install it, or give a folder"
        ) from None
    if not sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(_PATTERNS[kind]), ignore_patterns=list(_DUPLICATES)
        )
    except errors.GatedRepoError:
        raise _unusable(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        advice = _suggestion(Path(model)) or "check the name, or set HF_TOKEN"
        raise _unusable(f"{model} is neither a folder here nor on the hub: {advice}") from None
    except errors.RevisionNotFoundError:
        raise _unusable(f"{model} has no revision {revision} on the hub") from None
    except errors.LocalEntryNotFoundError:
        raise _unusable(
            f"{model} is not in the hub's cache on this machine, and the hub cannot be reached "
            f"(or HF_HUB_OFFLINE is set): {_suggestion(Path(model)) or 'connect, or give a folder'}"
        ) from None
    except Exception as error:
        # Broken connections come as errors of whichever HTTP library it uses, whose texts are for programmers.
        answer = getattr(getattr(error, "response", None), "status_code", None)
        why = f"it answered {answer}" if answer else getattr(error, "strerror", None) or "the connection broke"
        raise _unusable(f"{model} could not be downloaded from the hub ({why}): try again, or give a folder") from error
    return Path(folder)


def _suggestion(folder: Path) -> str:
    """Asks whether a model's folder was meant that lies where this path leads, under a name like this one's."""
    try:
        beside = [path.name for path in folder.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return ""
    meant = difflib.get_close_matches(folder.name, beside, n=1)
    return f"did you mean {folder.parent / meant[0]}?" if meant else ""


def _unusable(message: str) -> BlockyardError:
    return BlockyardError(Reason.MODEL_NOT_LOADED, message)
