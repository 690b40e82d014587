"""Helpers of the families' readers: sizes, activations and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from blockyard.model_config.decoder_config import Activation, Attention, DecoderConfig, Head, Layer, Mlp, Norm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blockyard.model_config.fields import Fields
    from blockyard.model_config.rotary import RotaryConfig

# By transformers' names, some of which mean the same function.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU_ERF,
    "gelu_python": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}
LAYER_TYPES = ("full_attention", "sliding_attention")
# transformers' default of `sliding_window` in the families that have windows.
DEFAULT_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    vocab_size: int
    hidden_size: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_sizes(
    fields: Fields,
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    inner: int | None = None,
    num_layers: int | None = None,
    has_own_heads: bool = True,
) -> Sizes:
    """Reads the sizes.

    Args:
        fields: the fields of config.json.
        head_dim: the default if config.json has none; None: hidden_size / num_attention_heads.
        num_kv_heads: the default if config.json has no `num_key_value_heads`; None: num_attention_heads. A null field
            always means num_attention_heads.
        inner: the default if config.json has no `intermediate_size`; None: the field is required.
        num_layers: the default if config.json has no `num_hidden_layers`; None: the field is required.
        has_own_heads: whether config.json may have `head_dim` and `num_key_value_heads`.
    """
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_default = num_heads if fields.has("num_key_value_heads") else num_kv_heads or num_heads
    even = max(1, hidden_size // num_heads)
    if hidden_size % num_heads and (not has_own_heads or (head_dim is None and fields.get("head_dim") is None)):
        fields.refuse(
            "hidden_size", f"config.json: hidden_size ({hidden_size}) must be a multiple of the {num_heads} heads"
        )
    sizes = Sizes(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        inner=fields.integer("intermediate_size", inner),
        num_layers=fields.integer("num_hidden_layers", num_layers),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", kv_default) if has_own_heads else num_heads,
        head_dim=fields.integer("head_dim", head_dim or even) if has_own_heads else even,
    )
    if sizes.num_heads % sizes.num_kv_heads:
        fields.refuse(
            "num_key_value_heads",
            f"config.json: num_attention_heads ({sizes.num_heads}) must be a multiple of num_key_value_heads "
            f"({sizes.num_kv_heads})",
        )
    if sizes.head_dim % 2:
        fields.refuse("head_dim", f"config.json: head_dim must be even, not {sizes.head_dim}")
    return sizes


class Windows(Enum):
    """Which layers of a family have a sliding window."""

    NEVER = auto()
    """No layer; a config.json with a window is refused."""
    ALWAYS = auto()
    """All layers, if there is a `sliding_window`."""
    FLAGGED = auto()
    """The layers that `layer_types` or `max_window_layers` names, if `use_sliding_window` is set."""


def read_windows(fields: Fields, kind: Windows, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Reads each layer's sliding window; None for full attention, also if no sequence exceeds the window."""
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    window = None if is_null else fields.integer("sliding_window", DEFAULT_WINDOW)
    bounded = window if window is not None and window < max_model_len else None
    types, is_used = read_layer_types(fields, num_layers), fields.flag("use_sliding_window")
    named = [kind == "sliding_attention" for kind in types] if types else None
    first = fields.integer("max_window_layers", 28, least=0)
    if kind is Windows.FLAGGED:
        slides = named or [is_used and layer >= first for layer in range(num_layers)]
        fits = not any(named or ()) or (is_used and window is not None)
    elif kind is Windows.ALWAYS:
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


def read_layer_types(fields: Fields, num_layers: int, known: Sequence[str] = LAYER_TYPES) -> list[str] | None:
    """Reads each layer's attention type; None if config.json does not state it."""
    types = fields.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= set(known):
        fields.refuse("layer_types", f"config.json: layer_types must name {' or '.join(known)} for each layer")
        return None
    return types


def read_pattern(fields: Fields, num_layers: int, every: int, *, first: str = "sliding_attention") -> list[str]:
    """Reads each layer's attention type; by default every `every`-th layer is full_attention, others are `first`."""
    types = read_layer_types(fields, num_layers)
    if types is None:
        types = [first if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    return types


def windows_of(fields: Fields, types: Sequence[str], max_model_len: int, default: int | None) -> list[int | None]:
    """Reads the window of sliding_attention layers. `default`: used if config.json has no `sliding_window`."""
    window = fields.integer("sliding_window", default) if fields.get("sliding_window") is not None else default
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        window = None
    if window is None and "sliding_attention" in types:
        fields.refuse("sliding_window", "config.json has layers of sliding_attention, and no sliding_window")
    bounded = window if window is not None and window < max_model_len else None
    return [bounded if kind == "sliding_attention" else None for kind in types]


def read_window(fields: Fields, max_model_len: int) -> int | None:
    """Reads the window of all layers; None if config.json has none or no sequence exceeds it."""
    if fields.get("sliding_window") is None:
        return None
    window = fields.integer("sliding_window")
    return window if window < max_model_len else None


def read_rms(fields: Fields, default: float = 1e-6, *, is_wide: bool = False) -> Norm:
    """Reads an RMS norm. `default`: the epsilon if config.json has none."""
    return Norm(epsilon=fields.number("rms_norm_eps", default, above=0.0), is_wide=is_wide)


def read_feed(fields: Fields, sizes: Sizes, *, has_bias: bool = False) -> Mlp:
    return Mlp(
        inner_features=sizes.inner, activation=fields.choose("hidden_act", ACTIVATIONS, "silu"), has_bias=has_bias
    )


def attention_of(sizes: Sizes, **more: Any) -> Attention:
    scale = more.pop("scale", sizes.head_dim**-0.5)
    heads = {"num_heads": sizes.num_heads, "num_kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    return Attention(**heads, scale=scale, **more)


def assemble(
    sizes: Sizes,
    max_model_len: int,
    layers: Iterable[Layer],
    rotaries: Sequence[RotaryConfig],
    final_norm: Norm | None,
    **more: Any,
) -> DecoderConfig:
    """Creates the network from its parts. `more`: other fields of DecoderConfig."""
    return DecoderConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=max_model_len,
        layers=tuple(layers),
        rotaries=tuple(rotaries),
        final_norm=final_norm,
        **more,
    )


def uniform(
    fields: Fields, sizes: Sizes, max_model_len: int, rotary: RotaryConfig, layer: Layer, *, is_tied: bool = False
) -> DecoderConfig:
    """Creates a network of equal layers and the same final norm. `is_tied`: the default of tie_word_embeddings."""
    head = Head(is_tied=fields.flag("tie_word_embeddings", default=is_tied))
    return assemble(sizes, max_model_len, [layer] * sizes.num_layers, [rotary], layer.norm, head=head)


def vary(layer: Layer, attentions: Iterable[Mapping[str, Any]]) -> Iterator[Layer]:
    """Yields a copy of the layer for each change of its attention's fields."""
    for change in attentions:
        assert layer.mixer is not None
        yield replace(layer, mixer=replace(layer.mixer, **change))
