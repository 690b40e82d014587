"""Reads config.json into one frozen dataclass, the network, and refuses every unsupported setting.

Reads what transformers 5 writes and what older versions wrote, as transformers 5 does. A field that transformers reads
is honoured or refused; one that nobody knows is remarked. Knows no weights and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.model_config.families import DEFAULT_WINDOW, FAMILIES, Family, Windows
from blockyard.model_config.fields import Fields, read_object, unusable
from blockyard.model_config.other_fields import HARMLESS, REFUSED
from blockyard.model_config.rotary import RotaryConfig, read_rotary

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.errors import Violation

DTYPES = ("float32", "bfloat16", "float16")
# Two names of one function in transformers.
_ACTIVATIONS = ("silu", "swish")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_QUANTIZED = ("quantization_config", "compression_config", "quantization")
_READ = """
    architectures model_type auto_map dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps attention_bias mlp_bias
    tie_word_embeddings max_position_embeddings original_max_position_embeddings rope_parameters rope_scaling
    rope_theta partial_rotary_factor sliding_window use_sliding_window max_window_layers layer_types
"""
KNOWN = HARMLESS | REFUSED.keys() | {*_READ.split(), *_QUANTIZED}
"""Fields of config.json that are read, refused or known to change nothing."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """A decoder's architecture, as config.json gives it."""

    architecture: str
    dtype_name: str
    """What the model computes in, one of DTYPES."""
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
    remarks: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Sentences for the log: what was passed over."""

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None where no layer has."""
        return next((window for window in self.windows if window is not None), None)


def read_network(folder: Path, dtype: str = "auto") -> NetworkConfig:
    """Reads a model folder's config.json.

    Args:
        folder: the model's folder.
        dtype: what to compute in; auto: as config.json says, float32 where it says nothing.

    Raises:
        BlockyardError: MODEL_NOT_LOADED with all violations, where the file is missing or damaged, or asks for what is
            not supported.
    """
    fields = Fields(read_object(folder / "config.json"))
    network = _read(fields, dtype)
    if network is None or fields.violations:
        message = "; ".join(violation.description for violation in fields.violations)
        raise unusable(message, tuple(fields.violations))
    return network


def find_violations(folder: Path, dtype: str = "auto") -> tuple[Violation, ...]:
    """Finds why a model cannot be served, as far as config.json shows: a sentence for each reason; empty: it can.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, where the file is missing or damaged.
    """
    fields = Fields(read_object(folder / "config.json"))
    _read(fields, dtype)
    return tuple(fields.violations)


def _read(fields: Fields, dtype: str) -> NetworkConfig | None:
    """Reads everything; None where no architecture is supported, of which nothing more can be said."""
    _refuse_quantized(fields)
    architecture, family = _family(fields)
    if family is None:
        return None
    _refuse_others(fields)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    rotary, max_model_len = read_rotary(fields)
    kv_default = num_heads if fields.has("num_key_value_heads") else family.num_kv_heads or num_heads
    network = NetworkConfig(
        architecture=architecture,
        dtype_name=_dtype(fields, dtype),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", kv_default),
        head_dim=fields.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads)),
        max_model_len=max_model_len,
        windows=_windows(fields, family, num_layers, max_model_len),
        rotary=rotary,
        options=_options(fields, architecture, family),
        remarks=tuple(fields.remarks),
    )
    _check_sizes(fields, network)
    return network


def _refuse_quantized(fields: Fields) -> None:
    for name in _QUANTIZED:
        if fields.get(name) is not None:
            problem = "the weights are quantized, which is not supported: load the model's original weights instead"
            fields.refuse(name, f"config.json has {name}: {problem}")


def _family(fields: Fields) -> tuple[str, Family | None]:
    """The first architecture that is supported."""
    given = fields.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    chosen = next((name for name in names if name in FAMILIES), "")
    needs_code = "it needs code that comes with the model, and such code is never run"
    if chosen:
        family, model_type = FAMILIES[chosen], fields.text("model_type", "")
        if fields.get("auto_map"):
            problem = f"config.json has auto_map: {needs_code} (take it out if {chosen} is all it needs)"
            fields.refuse("auto_map", problem)
        # One that belongs to another of the architectures is right for that one.
        if model_type not in ("", family.model_type) and family.model_type and len(names) == 1:
            problem = f"config.json names the architecture {chosen} and the model_type {model_type!r} of another one"
            fields.refuse("model_type", problem)
        return chosen, family
    problem = f"architecture {', '.join(map(repr, names))} is not supported" if names else ""
    problem = problem or "config.json names no architecture"
    if fields.get("auto_map"):
        problem += f": {needs_code}"
    fields.refuse("architectures", f"{problem} (supported: {', '.join(FAMILIES)})")
    return "", None


def _refuse_others(fields: Fields) -> None:
    """Refuses what would change the numbers, and remarks what nobody knows."""
    if (activation := fields.text("hidden_act", "silu")) not in _ACTIVATIONS:
        fields.refuse("hidden_act", f"config.json asks for the activation {activation!r} (supported: silu)")
    for name, neutral in REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            fields.refuse(name, f"config.json: {name} is {_short(value)}, which is not supported")
    if unknown := sorted(fields.values.keys() - KNOWN):
        fields.remarks.append(f"fields of config.json that are not known, and not read: {', '.join(unknown)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _dtype(fields: Fields, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name in DTYPES:
        return name
    fields.refuse("dtype", f"config.json asks for dtype {name!r}: set --dtype to one of {', '.join(DTYPES)}")
    return "float32"


def _options(fields: Fields, architecture: str, family: Family) -> NetworkOptions:
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    unread = {
        "attention_bias": attention_bias and not (family.reads_attention_bias or family.qkv_bias),
        "mlp_bias": mlp_bias and not family.reads_mlp_bias,
    }
    for name in (name for name, is_unread in unread.items() if is_unread):
        fields.refuse(name, f"config.json asks for {name}, which {architecture} does not have")
    has_attention_bias = family.reads_attention_bias and attention_bias
    return NetworkOptions(
        qkv_bias=family.qkv_bias or has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=family.reads_mlp_bias and mlp_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6, above=0.0),
    )


def _windows(fields: Fields, family: Family, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Reads each layer's window. One that no sequence is longer than is none."""
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    window = None if is_null else fields.integer("sliding_window", DEFAULT_WINDOW)
    bounded = window if window is not None and window < max_model_len else None
    types, is_used = _layer_types(fields, num_layers), fields.flag("use_sliding_window")
    named = [kind == "sliding_attention" for kind in types] if types else None
    first = fields.integer("max_window_layers", 28, least=0)
    if family.windows is Windows.FLAGGED:
        slides = named or [is_used and layer >= first for layer in range(num_layers)]
        fits = not any(named or ()) or (is_used and window is not None)
    elif family.windows is Windows.ALWAYS:
        slides = [True] * num_layers
        fits = named is None or (bounded is not None and named == slides)
        fits = fits and (bounded is None or fields.get("use_sliding_window") is not False)
    else:
        slides = [False] * num_layers
        fits = named in (None, slides) and not is_used and (bounded is None or not fields.has("sliding_window"))
    if not fits:
        problem = "do not fit one another, or windows that this architecture does not have"
        fields.refuse(
            "sliding_window", f"config.json has sliding_window, use_sliding_window and layer_types that {problem}"
        )
    return tuple(bounded if is_sliding else None for is_sliding in slides)


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= _LAYER_TYPES:
        problem = "config.json: layer_types must name full_attention or sliding_attention for each layer"
        fields.refuse("layer_types", problem)
        return None
    return types


def _check_sizes(fields: Fields, network: NetworkConfig) -> None:
    if network.num_heads % network.num_kv_heads:
        fields.refuse(
            "num_key_value_heads",
            f"config.json: num_attention_heads ({network.num_heads}) must be a multiple of num_key_value_heads "
            f"({network.num_kv_heads})",
        )
    if network.head_dim % 2:
        fields.refuse("head_dim", f"config.json: head_dim must be even, not {network.head_dim}")
