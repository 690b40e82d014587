"""Chooses how a device's kernels hold weights, and checks which quantizations they support."""

from __future__ import annotations

from blockyard.capacity.devices import has_avx512, multiplies
from blockyard.capacity.weights import WeightFormat
from blockyard.model_config.decoder_config import DecoderConfig, is_widely_served
from blockyard.model_config.fields import unusable

PANEL_COLUMNS = 32
# The kinds of device whose kernels support each quantization.
QUANTIZED_DEVICES = {"int8": ("cpu", "cuda"), "fp8": ("cuda",)}
# CPU rows are padded to words of four bytes; each has a float32 scale and a 32-bit sum.
CPU_WORD_BYTES, CPU_SCALE_BYTES = 4, 8
GPU_SCALE_BYTES = 4
# Dtypes that the CPU kernels compute in; torch computes in the others.
CPU_DTYPES = ("float32", "bfloat16")
# The CPU kernels multiply keys and values in int8 four at a time.
BYTES_OF_WORD = 4
# Quantizations allowed for the products that a quantized checkpoint leaves unquantized, such as its head.
_BESIDE_STORED = ("none", "int8")


def held_in(network: DecoderConfig, quantization: str) -> str:
    """Returns the format of the weights for messages, e.g. `int8` or the dtype's name."""
    if network.stored is not None:
        return network.stored.title + (f", the rest in {quantization}" if quantization != "none" else "")
    return network.dtype_name if quantization == "none" else quantization


def check_quantization(quantization: str, network: DecoderConfig, device_type: str, kernels: str) -> None:
    """Refuses a quantization that no device of this kind supports; missing kernels are found later, at loading.

    Raises:
        BlockyardError: MODEL_NOT_LOADED.
    """
    stored, dtype_name = network.stored, network.dtype_name
    if stored is not None and quantization not in _BESIDE_STORED:
        raise unusable(
            f"the weights are quantized already ({stored.title}): leave --quantization out, let it be int8 for those "
            "that are not, or take the original model"
        )
    if stored is not None and device_type == "cuda":
        raise unusable(
            f"the weights are quantized ({stored.title}), and kernels for GPUs do not multiply such yet: serve them on "
            "a processor, or take the original model"
        )
    devices = QUANTIZED_DEVICES.get(quantization, ())
    is_known = device_type in devices and (device_type != "cpu" or dtype_name in CPU_DTYPES)
    if quantization == "none" or (is_known and kernels != "reference"):
        return
    on_processors = "the kernels for x86-64 processors, built (make setup), and a model in bfloat16 or float32, or "
    raise unusable(
        f"{quantization} needs {on_processors if 'cpu' in devices else ''}a GPU with our kernels; "
        f"this is {dtype_name} on {device_type}, kernels: {kernels}"
    )


def check_kv_cache(kv_cache_dtype: str, network: DecoderConfig, device_type: str, kernels: str) -> None:
    """Refuses a dtype of KV blocks that the kernels do not serve.

    Raises:
        BlockyardError: MODEL_NOT_LOADED.
    """
    if kv_cache_dtype in ("auto", network.dtype_name):
        return
    if kv_cache_dtype != "int8":
        raise unusable(
            f"--kv-cache-dtype {kv_cache_dtype} needs a model that computes in it; "
            f"{network.architecture} computes in {network.dtype_name}: see --dtype"
        )
    if network.encoder is not None:
        raise unusable(f"--kv-cache-dtype int8: {network.architecture} is an encoder, which keeps no KV blocks")
    if network.head_dim % BYTES_OF_WORD:
        raise unusable(
            f"--kv-cache-dtype int8 needs heads of a multiple of {BYTES_OF_WORD} numbers, not {network.head_dim}"
        )
    if device_type != "cpu" and kernels != "reference":
        raise unusable("--kv-cache-dtype int8 is served on a CPU: kernels for GPUs do not read such blocks yet")


def check_ops(network: DecoderConfig, device_type: str, kernels: str) -> None:
    """Raises BlockyardError MODEL_NOT_LOADED if our GPU kernels lack an op that the network needs."""
    if device_type == "cuda" and kernels != "reference" and not is_widely_served(network):
        raise unusable(
            f"our kernels for GPUs lack operations that {network.architecture} needs: use --gpu-kernels reference"
        )


def weight_format(
    device_type: str, dtype_name: str, quantization: str, kernels: str, *, batch_invariant: bool = False
) -> WeightFormat:
    """Chooses the format in which kernels hold weights.

    Args:
        device_type: cpu or cuda.
        dtype_name: the model's dtype.
        quantization: of the linear products' weights.
        kernels: the kernels asked for on this kind of device, e.g. auto or reference.
        batch_invariant: whether a GPU must compute the same bits for a row in every batch.
    """
    is_quantized = quantization != "none"
    if device_type == "cuda":
        scale_bytes = GPU_SCALE_BYTES * is_quantized
        holds_tables = kernels != "reference" and not is_quantized
        return WeightFormat(scale_bytes=scale_bytes, keeps_leaves=batch_invariant, holds_tables=holds_tables)
    if kernels == "reference" or dtype_name not in CPU_DTYPES:
        return WeightFormat(is_wide=not multiplies(dtype_name), widens_leaves=True, holds_tables=False)
    is_narrow = kernels == "avx2" or (kernels == "auto" and not has_avx512())
    columns = PANEL_COLUMNS // 2 if is_narrow else PANEL_COLUMNS
    if not is_quantized:
        return WeightFormat(columns)
    return WeightFormat(columns, CPU_SCALE_BYTES, CPU_WORD_BYTES, holds_tables=False)
