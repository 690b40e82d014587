"""Finds the files of a model by folder, hub id, or as the demo model. Does not interpret them.

Standard library only, except for hub ids: the optional `huggingface_hub` downloads the needed files into its cache and
follows its environment variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.paths import check_path, read_file

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLE_PIECES = 64
PIECE_BYTES = 1024

Kind = Literal["weights", "tokenizer", "config", "all"]
OnProgress = Callable[[int, int], None]

_REPOSITORY, _PACKAGE = (Path(__file__).resolve().parents[1] / "models" / "demo", Path(__file__).parent / "demo_model")
DEMO_FOLDER = _REPOSITORY if _REPOSITORY.is_dir() else _PACKAGE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_FILES = ("config.json", "generation_config.json")
# sentence-transformers' files. Its modules have folders of their own, such as "1_Pooling".
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
    # Workers need the tokens' texts to apply grammars.
    "weights": (*_CONFIG_FILES, *_POOLING_FILES, "tokenizer.json", "*.safetensors", "*.safetensors.index.json"),
}
_PATTERNS["all"] = (*_PATTERNS["tokenizer"], *_PATTERNS["weights"])
# Copies of the weights under other names or of other training steps. Nothing is read from subfolders.
_DUPLICATES = ("[!0-9]*/*", "*/*/*", "consolidated*")


def resolve_model(model: str, revision: str, kind: Kind, on_progress: OnProgress | None = None) -> Path:
    """Finds the folder that holds a model's files, downloading them if need be.

    Args:
        model: a folder, a hub id (`owner/name`), or empty for the demo model.
        revision: for a hub id, a branch, tag or commit; empty: the main branch.
        kind: the files to download; ignored for a folder.
        on_progress: called with the bytes that are here and the bytes in total, which grow with each file that begins;
            None: a bar of the hub's library, if standard error is a terminal and not only small files are wanted.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with a message that says what to do; FIELD_INVALID for a malformed or overlong
            model or revision.
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
    # Unlike Path's methods these return False instead of raising if a folder may not be read.
    if os.path.isdir(folder):
        return _check(folder, f"{folder} has no config.json: give the folder of a model, or a hub id")
    if os.path.exists(folder):
        raise _unusable(f"{folder} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise _unusable(f"{model} is no folder on this machine: {_suggestion(folder) or 'check the path'}")
    folder = _download(model, revision or "main", kind, on_progress)
    return _check(folder, f"{model} has no config.json: it is not a language model")


def served_name(model: str, chosen: str) -> str:
    """Returns a model's name in requests: the chosen one; else the last part of its folder or hub id."""
    return chosen or (Path(model.rstrip("/")).absolute().name if model else "demo")


def check_revision(revision: str) -> None:
    """Raises BlockyardError FIELD_INVALID for a malformed revision, such as a path out of the cache."""
    check_path("revision", revision)
    if Path(revision).is_absolute() or ".." in Path(revision).parts:
        raise invalid([Violation("revision", "must be a branch, a tag or a commit")])


def find_companions(folder: Path) -> list[Path]:
    """Lists a model's configuration and tokenizer files."""
    patterns = [pattern for pattern in _PATTERNS["tokenizer"] if "/" not in pattern]
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def model_digest(folder: Path) -> str:
    """Hashes a model's config.json: SHA-256, in hex.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if there is no config.json or it cannot be read.
    """
    _check(folder, f"{folder} has no config.json")
    try:
        return hashlib.sha256(read_file(folder / "config.json")).hexdigest()
    except OSError as error:
        raise _unusable(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None


def tensor_digest(name: str, shape: Sequence[int], stored_dtype: str, content: memoryview) -> bytes:
    """Hashes a stored tensor: its name, shape and dtype, and up to 64 KiB of its bytes.

    Args:
        name: the tensor's name.
        shape: the tensor's shape.
        stored_dtype: the dtype by safetensors' name.
        content: all bytes of the tensor.

    Returns:
        SHA-256 of a line with name, shape and dtype, and of the bytes: all, or 64 evenly spaced pieces of 1 KiB.
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


def _download(model: str, revision: str, kind: Kind, on_progress: OnProgress | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download  # noqa: PLC0415  an optional feature
        from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415
    except ImportError:
        raise _unusable(
            f"{model} is no folder on this machine, and hub ids need the package huggingface_hub: "
            "install it, or give a folder"
        ) from None
    if on_progress is None and kind == "config":
        on_progress = _ignore
    if not sys.stderr.isatty() and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(_PATTERNS[kind]),
            ignore_patterns=list(_DUPLICATES),
            tqdm_class=_make_bar(on_progress) if on_progress else None,
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
        # Broken connections raise errors of the hub's HTTP library, whose texts do not help users.
        answer = getattr(getattr(error, "response", None), "status_code", None)
        why = f"it answered {answer}" if answer else getattr(error, "strerror", None) or "the connection broke"
        raise _unusable(f"{model} could not be downloaded from the hub ({why}): try again, or give a folder") from error
    return Path(folder)


def _ignore(_done_bytes: int, _total_bytes: int) -> None:
    """Shows no progress."""


def _make_bar(on_progress: OnProgress) -> type[Any]:
    """Makes a class of bars for the hub's library that draw nothing and report bytes."""
    from tqdm import tqdm  # noqa: PLC0415  the hub's library brings it

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*arguments, **{**settings, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            # The library has a bar of files too, and two of bytes: received, and written. Both have one total.
            if self.unit == "B" and self.total:
                on_progress(int(self.n), int(self.total))
            return shown

    return Bar


def _suggestion(folder: Path) -> str:
    """Suggests a model folder beside this path with a similar name; empty: there is none."""
    try:
        beside = [path.name for path in folder.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return ""
    meant = difflib.get_close_matches(folder.name, beside, n=1)
    return f"did you mean {folder.parent / meant[0]}?" if meant else ""


def _unusable(message: str) -> BlockyardError:
    return BlockyardError(Reason.MODEL_NOT_LOADED, message)
