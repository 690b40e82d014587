"""Reads a soft prompt's folder (PEFT's prompt tuning): rows that stand before the embeddings of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.fields import unusable
from worker_service.models.weight_files import STORED_DTYPES, map_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from worker_service.lora.peft_folder import PeftFolder

TENSOR = "prompt_embeddings"


def read_soft_prompt(folder: PeftFolder, width: int, dtype: torch.dtype, max_tokens: int) -> Tensor:
    """Reads the rows [at most max_tokens, width], rounded to `dtype`, as PEFT rounds them.

    Raises BlockyardError MODEL_NOT_LOADED if the folder is no soft prompt, or belongs to another model.
    """
    header, path = folder.header(), folder.weights_path
    entry = header.get(TENSOR)
    if entry is None or len(header) > 1 or entry.stored_dtype not in STORED_DTYPES:
        raise unusable(f"{path} must have {TENSOR} in floating point and nothing else, and has {', '.join(header)}")
    if (folder.fields.get("num_transformer_submodules") or 1) != 1:
        raise unusable(f"{folder.config_path}: num_transformer_submodules above 1 is for models of two halves")
    num_tokens, told = folder.fields.get("num_virtual_tokens"), folder.fields.get("token_dim")
    if len(entry.shape) != 2 or entry.shape[0] != num_tokens or told not in (None, entry.shape[1]):
        sizes = f"num_virtual_tokens {num_tokens} and token_dim {told}"
        raise unusable(f"{path}: {TENSOR} is {list(entry.shape)}, and {folder.config_path.name} has {sizes}")
    if entry.shape[1] != width:
        raise unusable(f"{path} has rows of {entry.shape[1]} numbers, and the model {width}: take one for this model")
    if not 1 <= entry.shape[0] <= max_tokens:
        limit = f"more than --max-prompt-adapter-tokens {max_tokens}" if entry.shape[0] else "which is none"
        raise unusable(f"{path} has {entry.shape[0]} virtual tokens, {limit}")
    return map_tensor(entry, reads_ahead=True).to(dtype, copy=True)
