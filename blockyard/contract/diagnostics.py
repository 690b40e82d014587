"""The built-in operations of every worker, those of the extension `diagnostics`, and the time limits of operations."""

from __future__ import annotations

DEFAULT_SECONDS, MAX_SECONDS = 30.0, 120.0
"""The time limit of an operation of any extension: the default, and the highest that a caller may set."""
DIAGNOSTICS = "diagnostics"
OPERATIONS = (
    "check_numerics",
    "measure_bandwidth",
    "weight_norms",
    "memory_summary",
    "describe_group",
    "describe_model",
    "collect_garbage",
)


def find_operation(name: str) -> tuple[str, str]:
    """Splits `extension.operation`; a name without an extension must be one of OPERATIONS.

    Such a name may have dashes instead of underscores; raises TypeError if it is unknown.
    """
    extension, _, operation = name.rpartition(".")
    if extension:
        return extension, operation
    operation = name.replace("-", "_")
    if operation not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise TypeError(f"there is no operation {name!r}: name one of {known}, or an extension's, extension.operation")
    return DIAGNOSTICS, operation
