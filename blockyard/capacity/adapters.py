"""Limits on the number and rank of LoRA adapters, and the memory that they take.

The sizes equal those that the kernels allocate (`blockyard_kernels.lora.LoraOps.make_room`); a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.capacity.formats import weight_format
from blockyard.capacity.weights import ITEM_BYTES, Product, WeightFormat, feed_products, mixer_products
from blockyard.contract.workers import NO_LORAS, LoraLimits
from blockyard.errors import Violation
from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS
from blockyard.model_config.decoder_config import Attention, DecoderConfig, Experts
from blockyard.model_config.fields import unusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.lora.settings import LoraSettings
    from blockyard.model_config.decoder_config import Layer
    from blockyard.model_config.share import Share

MAX_LORAS = 256
MAX_RANK = 512
MAX_CPU_LORAS = 2**16
# The CPU kernels multiply this many bytes at a time along the inner dimension.
CPU_WORD_BYTES = 4
GPU_WIDTH_MULTIPLE, GPU_HEADER_BYTES, GPU_ALIGNMENT = 16, 64, 64


def lora_limits(settings: LoraSettings) -> LoraLimits:
    max_cpu_loras = max(settings.max_cpu_loras or 4 * settings.max_loras, settings.max_loras)
    return LoraLimits(settings.max_loras, settings.max_lora_rank, max_cpu_loras, settings.max_prompt_adapter_tokens)


def wrong_limits(limits: LoraLimits) -> Iterable[Violation]:
    ranges = {
        "max_loras": (1, MAX_LORAS),
        "max_lora_rank": (0 if limits.max_prompt_adapter_tokens else 1, MAX_RANK),
        "max_cpu_loras": (limits.max_loras, MAX_CPU_LORAS),
        "max_prompt_adapter_tokens": (0, MAX_VIRTUAL_TOKENS),
    }
    for name, (low, high) in ranges.items():
        if not low <= getattr(limits, name) <= high:
            yield Violation(f"lora.{name}", f"must be from {low} to {high}")


def check_adapters(network: DecoderConfig, limits: LoraLimits) -> None:
    """Raises BlockyardError MODEL_NOT_LOADED if adapters are asked for and the model pools."""
    if limits != NO_LORAS and network.pooling is not None:
        raise unusable(f"a model that pools ({network.pooling.task}) takes no adapters: start without --max-loras")


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """How kernels hold adapters."""

    factors: WeightFormat
    width_multiple: int = 1
    """The width between the two factors (the rank) is padded to a multiple of this."""
    header_bytes: int = 0
    alignment: int = 1
    """The bytes of an adapter for one weight are padded to a multiple of this."""
    has_slots: bool = False
    """True: the slots take device memory and the host's cache does not. False: only the cache takes device memory."""


def adapter_format(device_type: str, dtype_name: str, kernels: str) -> AdapterFormat:
    """Chooses how kernels hold adapters. See `blockyard.capacity.formats.weight_format` for the arguments."""
    if device_type == "cuda":
        if kernels == "reference":
            return AdapterFormat(WeightFormat())
        return AdapterFormat(WeightFormat(), GPU_WIDTH_MULTIPLE, GPU_HEADER_BYTES, GPU_ALIGNMENT, has_slots=True)
    held = weight_format(device_type, dtype_name, "none", kernels)
    if held.panel_columns > 1:
        return AdapterFormat(held, max(1, CPU_WORD_BYTES // ITEM_BYTES[dtype_name]))
    # torch multiplies the factors in float32, whatever the model's dtype is.
    return AdapterFormat(replace(held, is_wide=True))


def adapter_bytes(network: DecoderConfig, share: Share, held: AdapterFormat, max_rank: int) -> int:
    """Counts the bytes that an adapter of LoRA rank `max_rank` takes on one worker."""
    item_bytes, total = ITEM_BYTES[network.dtype_name], 0
    for layer in (network.layers[index] for index in share.layers):
        # Adapters change no routers, and of experts only those that all rows share.
        fed = feed_products(network, share, layer.mlp) if layer.mlp is not None else ()
        mixed = mixer_products(network, share, layer.mixer) if layer.mixer is not None else ()
        products = *mixed, *fed
        for product, num_modules in zip(products, _module_counts(network, layer), strict=True):
            width = _up_to_multiple(max_rank * num_modules, held.width_multiple)
            factors = Product(width, product.in_features, leaves=product.leaves), Product(product.num_rows, width)
            numbers = sum(held.factors.held_bytes(each, item_bytes) for each in factors)
            total += _up_to_multiple(held.header_bytes + numbers, held.alignment)
    return total


def _module_counts(network: DecoderConfig, layer: Layer) -> tuple[int, ...]:
    """Counts the checkpoint's modules that each fused product of a layer holds: q, k, v; o; gate, up; down."""
    names = network.names
    is_attention = isinstance(layer.mixer, Attention)
    attended = len({names.query, names.key, names.value} if is_attention else names.recurrent.inputs), 1
    attended = attended if layer.mixer is not None else ()
    if layer.mlp is None:
        return attended
    gate, up = names.experts.shared[:2] if isinstance(layer.feed, Experts) else (names.gate, names.up)
    return *attended, len({gate, up}) if layer.mlp.is_gated else 1, 1


def lora_bytes(network: DecoderConfig, share: Share, held: AdapterFormat, limits: LoraLimits) -> int:
    """Counts the device bytes that adapters take on one worker: the slots, or the whole cache."""
    if not limits.max_loras:
        return 0
    lora = adapter_bytes(network, share, held, limits.max_lora_rank) if limits.max_lora_rank else 0
    row_bytes = network.hidden_size * ITEM_BYTES[network.dtype_name] if share.is_first_stage else 0
    prompt = limits.max_prompt_adapter_tokens * row_bytes
    if held.has_slots:
        return limits.max_loras * (lora + prompt)
    return limits.max_loras * prompt + limits.max_cpu_loras * max(lora, prompt)


def _up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
