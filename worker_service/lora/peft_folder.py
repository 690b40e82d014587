"""A folder in PEFT's format: adapter_config.json and adapter_model.safetensors, for any type of adapter.

A field that changes results and is not supported is refused by its name. Files in PyTorch's own format are not read,
since loading them runs code. Knows no fields and tensors of single adapter types.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import TYPE_CHECKING

from blockyard.model_config.fields import read_object, unusable
from blockyard.paths import open_file
from worker_service.models.weight_files import TensorEntry, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.errors import BlockyardError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PIECE_BYTES = 1 << 20

LORA = "LORA"
PROMPT_TUNING = "PROMPT_TUNING"

# Fields that change an adapter's results, each with the value that changes nothing; null and empty change nothing.
_NEUTRAL: dict[str, object] = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "megatron_config": None,
    "arrow_config": None,
}


class PeftFolder:
    """An adapter's folder. Raises BlockyardError MODEL_NOT_LOADED for any fault of the folder."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """`root`: the folder below which the files must lie, links resolved; None: they may lie anywhere."""
        self.path = path
        self._root = root
        self.config_path = path / CONFIG_FILE
        self.weights_path = path / WEIGHTS_FILE
        self.fields = read_object(self.config_path, root)
        """The configuration, whose type and fields are all supported."""
        self.kind = self.fields.get("peft_type")
        """LORA or PROMPT_TUNING."""
        if self.kind not in (LORA, PROMPT_TUNING):
            served = f"{LORA} and {PROMPT_TUNING} alone are served"
            raise unusable(f"{self.config_path}: peft_type is {self.kind!r}, and {served}")
        for name, neutral in _NEUTRAL.items():
            value = self.fields.get(name)
            if value not in (None, False, neutral, [], {}):
                raise unusable(f"{self.config_path}: {name} is {value!r}, which is not served")

    def header(self) -> dict[str, TensorEntry]:
        """Reads the header of the tensors' file, which has at least one tensor."""
        try:
            header = read_header(self.weights_path, self._root)
        except FileNotFoundError:
            raise _missing(self.path) from None
        except OSError as error:
            raise unusable(f"{self.weights_path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, struct.error):
            raise unusable(f"{self.weights_path} is damaged or not complete: download it again") from None
        if not header:
            raise unusable(f"{self.weights_path} has no tensors")
        return header

    def digest(self) -> str:
        digest = hashlib.sha256()
        try:
            for path in (self.config_path, self.weights_path):
                with open_file(path, self._root) as file:
                    digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
                    while piece := file.read(PIECE_BYTES):
                        digest.update(piece)
        except OSError as error:
            raise unusable(f"{self.path} cannot be read: {error.strerror}") from None
        return digest.hexdigest()


def _missing(folder: Path) -> BlockyardError:
    if (folder / "adapter_model.bin").exists():
        return unusable(
            f"{folder} has its weights in PyTorch's own format, which is not read, since loading it can run code: save "
            f"it again with PEFT, safe_serialization=True"
        )
    return unusable(f"{folder} has no {WEIGHTS_FILE}: download it too")
