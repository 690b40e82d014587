"""Loads a model folder into a network that transformers' code computes.

It never runs a model's own code, even if the files request it, and downloads nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from blockyard.capacity.weights import check_room
from blockyard.model_config.decoder_config import DTYPES, Attention, Head, Layer, Mlp, Norm
from blockyard.model_config.fallback import Outline, read_outline
from blockyard.model_config.fields import unusable
from blockyard_kernels.select import get_backend, make_arena
from worker_service.device.memory import room_for_weights
from worker_service.models.fallback.attention import IMPLEMENTATION
from worker_service.models.fallback.model import Network, TransformersModel
from worker_service.models.fallback.packing import Packer, pack_network
from worker_service.models.fallback.survey import Survey, refuse, survey_network
from worker_service.models.model_config import ModelConfig
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import Backend

# Our own code reports the progress of a load, so transformers' progress bars are off.
transformers.utils.logging.disable_progress_bar()

DTYPE_OF: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
# transformers' classes may read any field of config.json, and raise all kinds of Python errors if one is wrong.
_TROUBLE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    model: TransformersModel
    backend: Backend
    config: ModelConfig
    arena: Arena
    files: WeightFiles


def load_network(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    on_progress: Callable[[int, int], None],
    kernels: str = "auto",
    *,
    batch_invariant: bool = False,
) -> LoadedNetwork:
    """Loads a network. Arguments as in `worker_service.models.loader.load_model`.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with advice in the message.
    """
    outline = read_outline(folder, "auto" if dtype is None else str(dtype).removeprefix("torch."))
    dtype = DTYPE_OF[outline.dtype_name]
    try:
        backend = get_backend(device, dtype, kernels, batch_invariant=batch_invariant)
    except ValueError as error:
        raise unusable(str(error)) from None
    if not backend.is_complete:
        raise refuse(outline.architecture, f"the {backend.name} kernels lack ops: --gpu-kernels reference has them")
    files = WeightFiles(folder, on_progress)
    check_room(_count_bytes(files, dtype), room_for_weights(device), outline.dtype_name, device.type)
    survey, config = survey_model(folder, outline, dtype)
    model = _read_weights(folder, outline, dtype, device)
    for name, shape in files.shapes.items():
        files.pass_over(name, shape)
    packer = Packer(backend, dtype, kernels, make_arena(device))
    try:
        pack_network(model, model.get_output_embeddings(), survey.together, packer)
        network = TransformersModel(config, Network(model, survey.sites, packer), survey, _identify(model, folder))
    except _TROUBLE as error:
        raise refuse(outline.architecture, f"the network fails with our operations ({_say(error)})") from error
    return LoadedNetwork(network, backend, config, packer.arena, files)


def _count_bytes(files: WeightFiles, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in files.shapes.values()) * dtype.itemsize


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": IMPLEMENTATION, "trust_remote_code": False}


def survey_model(folder: Path, outline: Outline, dtype: torch.dtype) -> tuple[Survey, ModelConfig]:
    """Reads the configuration with transformers' classes, and surveys their network without its weights.

    Raises BlockyardError MODEL_NOT_LOADED.
    """
    try:
        given = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = given.get_text_config(decoder=True)
        _check_class(transformers.AutoModelForCausalLM._model_mapping.get(type(given), None), outline)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(given, **_options(dtype))
    except _TROUBLE as error:
        raise refuse(outline.architecture, f"it does not take config.json ({_say(error)})") from error
    _check_parts(model, outline.architecture)
    model.set_experts_implementation(IMPLEMENTATION)
    max_model_len = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise refuse(outline.architecture, "config.json has no max_position_embeddings")
    try:
        survey = survey_network(model.eval(), model.base_model, outline.architecture, max_model_len)
    except _TROUBLE as error:
        raise refuse(outline.architecture, f"it does not run without its weights ({_say(error)})") from error
    return survey, _make_config(outline, survey, text, dtype, max_model_len)


def _check_class(kind: Any, outline: Outline) -> None:
    """Refuses a network that config.json does not name, and a network that computes attention itself."""
    if not isinstance(kind, type):
        raise refuse(outline.architecture, "it is no causal language model, by its model_type")
    found = kind.__name__
    if found != outline.architecture:
        raise refuse(outline.architecture, f"its model_type belongs to {found}, and config.json does not name that")
    if not kind._supports_attention_backend:
        raise refuse(found, "its attention cannot be replaced (transformers: _supports_attention_backend is false)")


def _check_parts(model: Any, architecture: str) -> None:
    """Refuses a network that cannot be run in the two parts that a step has."""
    if model.base_model is model or model.get_output_embeddings() is None:
        raise refuse(architecture, "the network has no separate body and head")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise refuse(architecture, "the network takes no positions, so a step could hold one text alone")


def _make_config(outline: Outline, survey: Survey, text: Any, dtype: torch.dtype, max_model_len: int) -> ModelConfig:
    """Makes the configuration of a surveyed network: its heads, its windows, and the sizes of its tables."""
    hidden_size, vocab_size = int(text.hidden_size), int(text.vocab_size)
    inner = getattr(text, "intermediate_size", None)
    feed = Mlp(inner_features=inner if isinstance(inner, int) and inner > 0 else 4 * hidden_size)
    layers = tuple(
        Layer(
            mixer=Attention(
                num_heads=site.shape.num_heads,
                num_kv_heads=site.shape.num_kv_heads,
                head_dim=site.shape.head_dim,
                scale=site.shape.scale,
                softcap=site.shape.softcap,
                window=site.window,
                rotary=None,
            ),
            feed=feed,
            norm=Norm(),
        )
        for site in survey.sites.values()
    )
    return ModelConfig(
        architecture=outline.architecture,
        dtype_name=outline.dtype_name,
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_model_len=max_model_len,
        layers=layers,
        rotaries=(),
        final_norm=Norm(),
        head=Head(),
        remarks=outline.remarks,
    )


def _read_weights(folder: Path, outline: Outline, dtype: torch.dtype, device: torch.device) -> Any:
    """Reads all weights. Refuses files that do not match the network: transformers would fill gaps at random."""
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            device_map=None,
            **_options(dtype),
        )
    except _TROUBLE as error:
        raise refuse(outline.architecture, f"its weights cannot be read ({_say(error)})") from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if wrong := sorted(map(str, info.get(kind) or ())):
            message = f"{folder}: the weights do not belong to its config.json ({kind.replace('_', ' ')}: {wrong[0]})"
            raise unusable(message)
    model.set_experts_implementation(IMPLEMENTATION)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    assert isinstance(model, nn.Module)
    return model.to(device).eval()


def _identify(model: nn.Module, folder: Path) -> str:
    """Names the code that computes a model: transformers' version, and hashes of its code and of config.json."""
    code = hashlib.sha256(Path(inspect.getfile(type(model))).read_bytes()).hexdigest()
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return f"transformers {transformers.__version__} {code} {config}"


def _say(error: BaseException) -> str:
    """Returns the class and the first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
