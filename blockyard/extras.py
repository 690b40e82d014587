"""Names the extra to install for a missing package, without importing any package."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

# The packages that each extra installs; a test compares them with pyproject.toml.
PACKAGES = {
    "cli": ("typer", "rich", "psutil"),
    "service": ("grpc_health", "grpc_reflection", "pydantic", "yaml"),
    "gateway": ("fastapi", "uvicorn", "tokenizers", "sentencepiece", "jinja2", "huggingface_hub", "prometheus_client"),
    "scheduler": ("huggingface_hub", "prometheus_client"),
    "worker": ("torch", "numpy", "safetensors", "crc32c", "huggingface_hub", "psutil", "prometheus_client"),
}


class MissingPackages(ImportError):
    """Packages are not installed; the message names the extra that installs them."""


@contextmanager
def naming_extra(what: str, extra: str) -> Generator[None]:
    """Turns a ModuleNotFoundError of a known package into MissingPackages, which names the extra."""
    known = {package for packages in PACKAGES.values() for package in packages}
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in known:
            raise
        raise _make_error(what, [package], extra) from None


def require_services(what: str) -> None:
    """Raises MissingPackages with all missing packages if the services cannot run here."""
    packages = dict.fromkeys(package for each in PACKAGES.values() for package in each)
    if missing := [package for package in packages if find_spec(package) is None]:
        raise _make_error(what, missing, "serve")


def _make_error(what: str, packages: list[str], extra: str) -> MissingPackages:
    kind = "a package that is" if len(packages) == 1 else "packages that are"
    return MissingPackages(
        f"{what} needs {kind} not installed ({', '.join(packages)}): pip install 'blockyard[{extra}]'"
    )
