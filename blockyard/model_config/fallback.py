"""Decides which models transformers' own code computes, and reads what config.json says of them.

Only models outside Blockyard's families are read here; transformers' classes define their networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.model_config.fields import Fields, read_object, refuse_own_code, unusable
from blockyard.model_config.network import find_architecture, read_dtype
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_config.stored_weights import CONFIG_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator


PACKAGE = "transformers"
MODEL_CODES = ("auto", "native", "transformers")
"""Values of `--model-code`. auto: Blockyard's code if it knows the architecture, else transformers'."""
INSTALL = "pip install 'blockyard[transformers]'"
SLOWER = (
    "transformers' own code computes this model, over our ops: it is slower than a model that Blockyard knows, and "
    "takes neither tensor nor pipeline parallelism, quantization, adapters nor updates of its weights"
)


@dataclass(frozen=True, slots=True)
class Outline:
    """The facts of config.json about a model that transformers' code computes."""

    architecture: str
    """The first of the model's architectures that the installed transformers has."""
    dtype_name: str
    remarks: tuple[str, ...] = (SLOWER,)


def is_installed() -> bool:
    """Returns whether transformers is installed here; imports nothing."""
    return find_spec(PACKAGE) is not None


@cache
def list_of_models() -> str:
    """Reads the file in which transformers lists its networks: importing it would take seconds, and torch."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.origin:
        return ""
    file = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _known_architecture(fields: Fields) -> str:
    """Returns the model's first architecture that the installed transformers has; empty: none."""
    given = fields.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    return next((name for name in names if f'"{name}"' in list_of_models()), "")


def needs_transformers(folder: Path, model_code: str) -> bool:
    """Returns whether transformers' code computes a model. `model_code`: the value of `--model-code`.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if config.json is missing or damaged, or transformers is asked for and not
            installed.
    """
    if model_code == "native":
        return False
    if model_code == "transformers":
        if not is_installed():
            raise unusable(f"--model-code transformers needs that package: {INSTALL}")
        return True
    fields = Fields(read_object(folder / "config.json"))
    return not find_architecture(fields) and bool(_known_architecture(fields))


def check_settings(
    folder: Path,
    *,
    quantization: str,
    load_format: str,
    num_workers: int,
    task: Task = Task.UNSPECIFIED,
    kv_cache_dtype: str = "auto",
) -> None:
    """Refuses settings that transformers' code does not support; raises BlockyardError MODEL_NOT_LOADED.

    `num_workers`: of a replica. `task`: the task to serve; UNSPECIFIED: as the model's files say.
    """
    architecture = read_outline(folder).architecture
    wrong = list(_wrong_settings(quantization, load_format, num_workers, kv_cache_dtype))
    if (rule := read_rule(folder, task, architecture)) is not None:
        wrong.append(f"other task than to generate ({rule.task})")
    if wrong:
        raise unusable(f"transformers' code computes {architecture}, and takes no {', no '.join(wrong)}")


def _wrong_settings(quantization: str, load_format: str, num_workers: int, kv_cache_dtype: str) -> Iterator[str]:
    if quantization != "none":
        yield f"--quantization {quantization}"
    if kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {kv_cache_dtype}"
    if load_format != "auto":
        yield f"--load-format {load_format}"
    if num_workers > 1:
        yield f"replica of {num_workers} workers (tensor and pipeline parallelism)"


def read_outline(folder: Path, dtype: str = "auto") -> Outline:
    """Reads the config.json of a model that transformers' code computes. `dtype`: as for `read_network`.

    Raises:
        BlockyardError: MODEL_NOT_LOADED with all violations, if config.json is missing or damaged, or the model needs
            its own code or has quantized weights.
    """
    fields = Fields(read_object(folder / "config.json"))
    for name in CONFIG_FIELDS:
        if fields.get(name):
            fields.refuse(
                name, f"config.json has {name}, which transformers' code is not served with: take the original weights"
            )
    refuse_own_code(fields)
    architecture = _known_architecture(fields)
    if not architecture:
        fields.refuse("architectures", "config.json names no architecture that transformers installed here has")
    if (folder / "adapter_config.json").exists():
        # transformers would silently load the base model that the adapter names.
        fields.refuse("adapter_config.json", f"{folder} is an adapter: give the folder of its model")
    dtype_name = read_dtype(fields, dtype)
    if fields.violations:
        raise unusable("; ".join(violation.description for violation in fields.violations), tuple(fields.violations))
    return Outline(architecture, dtype_name)
