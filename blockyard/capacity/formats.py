"""How the kernels of a device hold weights, and which quantizations they know."""

from __future__ import annotations

from blockyard.capacity.weights import WeightFormat
from blockyard.model_config.fields import unusable

PANEL_COLUMNS = 32
# The dtypes of models whose weights may be held in so many bits, by the kind of device.
QUANTIZED_DTYPES = {"int8": {"cpu": ("bfloat16", "float32")}}
# Dtypes that the kernels for processors compute in; torch computes in others.
CPU_DTYPES = ("float32", "bfloat16")


def check_quantization(quantization: str, dtype_name: str, device_type: str, kernels: str) -> None:
    """Refuses what no machine of this kind can do; one without the kernels is refused when they are looked for.

    Raises:
        BlockyardError: MODEL_NOT_LOADED.
    """
    if quantization == "none":
        return
    known = QUANTIZED_DTYPES[quantization].get(device_type, ())
    if dtype_name not in known or kernels == "reference":
        raise unusable(
            f"{quantization} needs the kernels for x86-64 processors, built (make setup), and a model in bfloat16 or "
            f"float32; this is {dtype_name} on {device_type}, kernels: {kernels}"
        )


def weight_format(device_type: str, dtype_name: str, quantization: str, kernels: str) -> WeightFormat:
    """Chooses how weights are held.

    Args:
        device_type: cpu or cuda.
        dtype_name: of the model.
        quantization: of the weights of products.
        kernels: those asked for on this kind of device.
    """
    if device_type == "cuda":
        return WeightFormat(holds_tables=kernels != "reference")
    if kernels == "reference" or dtype_name not in CPU_DTYPES:
        # Few processors multiply half floats of 16 bits.
        return WeightFormat(is_wide=dtype_name not in CPU_DTYPES, widens_leaves=True, holds_tables=False)
    is_int8 = quantization == "int8"
    columns = PANEL_COLUMNS // 2 if kernels == "avx2" else PANEL_COLUMNS
    return WeightFormat(columns, is_int8=is_int8, holds_tables=not is_int8)
