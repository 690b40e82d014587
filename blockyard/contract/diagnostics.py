"""Names the operations that every worker can do for an operator: those of the extension `diagnostics`."""

from __future__ import annotations

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
    """Returns the extension and the operation of a name: `extension.operation`, or one of OPERATIONS alone.

    A name alone may have dashes; TypeError is raised for one that is not in the list.
    """
    extension, _, operation = name.rpartition(".")
    if extension:
        return extension, operation
    operation = name.replace("-", "_")
    if operation not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise TypeError(f"there is no operation {name!r}: name one of {known}, or an extension's, extension.operation")
    return DIAGNOSTICS, operation
