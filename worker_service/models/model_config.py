"""What a network is made of: config.json read into one frozen dataclass, with every unsupported setting refused.

Reads what transformers 5 writes and what older versions wrote. Knows no weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from blockyard.errors import BlockyardError, Reason
from worker_service.models.registry import FAMILIES, Family, Windows
from worker_service.models.rotary import KINDS, REQUIRED_PARAMETERS, RotaryConfig

if TYPE_CHECKING:
    from pathlib import Path

# Some models name a length without end; lengths travel as 32 bits.
MAX_MODEL_LEN = 2**31 - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """What differs between networks of one kind."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    """The logits are made with the embedding's table."""
    norm_epsilon: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's architecture. Read from config.json; the rest of the worker reads sizes from it."""

    architecture: str
    dtype: torch.dtype
    """What the model computes in."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    windows: tuple[int | None, ...]
    """For each layer the keys that a query sees, its own among them; None: all."""
    rotary: RotaryConfig
    options: NetworkOptions

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None where no layer has."""
        return next((window for window in self.windows if window is not None), None)


def unusable(message: str) -> BlockyardError:
    """The error of a model that cannot be loaded as it is: the message says what to do."""
    return BlockyardError(Reason.MODEL_NOT_LOADED, message)


def read_config(folder: Path, dtype: torch.dtype | None) -> ModelConfig:
    """Reads a model folder's config.json.

    Args:
        folder: the model's folder.
        dtype: what to compute in; None: as config.json says, float32 where it says nothing.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, where the file is missing, damaged, or asks for what is not supported.
    """
    fields = _Fields.read(folder / "config.json")
    architecture, family = _family(fields)
    if fields.get("quantization_config") is not None:
        raise unusable("the weights are quantized, which is not supported: load the model's original weights instead")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise unusable(f"config.json asks for the activation {activation!r}; supported is silu")
    num_heads = fields.integer("num_attention_heads")
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
    rotary, max_model_len = _rotary(fields)
    config = ModelConfig(
        architecture=architecture,
        dtype=dtype or _dtype(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden_size // num_heads),
        max_model_len=max_model_len,
        windows=_windows(fields, family, num_layers),
        rotary=rotary,
        options=NetworkOptions(
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            tied_embeddings=fields.flag("tie_word_embeddings"),
            norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        ),
    )
    _check_sizes(config)
    return config


class _Fields:
    """config.json's object: fields by name, each checked for its type."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def read(cls, path: Path) -> _Fields:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise unusable(f"{path.parent} has no config.json: give the folder of a model, or a hub id") from None
        except ValueError as error:
            raise unusable(f"{path} is not valid JSON ({error}): download it again") from None
        if not isinstance(fields, dict):
            raise unusable(f"{path} is not a JSON object: download it again")
        return cls(fields)

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise unusable(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float):
            raise unusable(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        return bool(self._fields.get(name))

    def text(self, name: str, default: str) -> str:
        return str(self._value(name, default))

    def _value(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None and default is None:
            raise unusable(f"config.json has no {name}: is this a model of a supported architecture?")
        return default if value is None else value


def _family(fields: _Fields) -> tuple[str, Family]:
    names = fields.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name in FAMILIES:
        return name, FAMILIES[name]
    told = f"architecture {name!r} is not supported" if name else "config.json names no architecture"
    if fields.get("auto_map"):
        told += ": it needs code that comes with the model, and such code is never run"
    raise unusable(f"{told}; supported are {', '.join(FAMILIES)}")


def _dtype(fields: _Fields) -> torch.dtype:
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise unusable(f"config.json asks for dtype {name!r}: set --dtype to one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _rotary(fields: _Fields) -> tuple[RotaryConfig, int]:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta`, and the length they reach."""
    given: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unusable(f"config.json: rope_parameters or rope_scaling must be an object, not {given!r}")
    if any(isinstance(value, dict) for value in given.values()):
        raise unusable("config.json has rotary embeddings that differ between layers, which is not supported")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in KINDS:
        raise unusable(f"config.json asks for rotary embeddings of type {kind!r}; supported are {', '.join(KINDS)}")
    if float(given.get("partial_rotary_factor") or fields.number("partial_rotary_factor", 1)) != 1:
        raise unusable("config.json asks for partial rotary embeddings, which are not supported")
    max_len = fields.integer("max_position_embeddings")
    parameters = {name: float(value) for name, value in given.items() if isinstance(value, int | float)}
    # As in transformers: the field beside `rope_parameters` goes before the one inside.
    inside = parameters.get("original_max_position_embeddings", max_len)
    parameters["original_max_position_embeddings"] = fields.number("original_max_position_embeddings", inside)
    for name in REQUIRED_PARAMETERS[kind]:
        if name not in parameters:
            raise unusable(f"config.json: rotary embeddings of type {kind!r} need {name}")
    theta = parameters.pop("rope_theta", None) or fields.number("rope_theta", 10000.0)
    if kind in ("linear", "yarn"):
        # Some models give the stretched length in config.json and some the original one.
        max_len = max(max_len, int(parameters["original_max_position_embeddings"] * parameters["factor"]))
    return RotaryConfig(kind, theta, parameters), min(max_len, MAX_MODEL_LEN)


def _windows(fields: _Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    flagged = family.windows is Windows.FLAGGED
    unused = family.windows is Windows.NEVER or (flagged and not fields.flag("use_sliding_window"))
    if unused or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if not flagged:
        return (window,) * num_layers
    types = fields.get("layer_types")
    if types is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not set(types) <= {"full_attention", "sliding_attention"}
    ):
        raise unusable("config.json: layer_types must name full_attention or sliding_attention for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_sizes(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise unusable("config.json: num_attention_heads must be a multiple of num_key_value_heads")
    if config.head_dim % 2:
        raise unusable("config.json: head_dim must be even")
