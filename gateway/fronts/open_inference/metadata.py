"""The metadata of the server and of a model: names, versions and tensors. gRPC and HTTP answer with the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.errors import Reason, Violation, invalid, quote
from blockyard.version import __version__
from gateway.fronts.open_inference.call import INPUTS, MODEL_VERSION, OUTPUTS, is_version

if TYPE_CHECKING:
    from gateway.generation import GenerationService

NAME = "blockyard"


def server_metadata(*extensions: str) -> dict[str, Any]:
    return {"name": NAME, "version": __version__, "extensions": extensions}


def model_metadata(generation: GenerationService, name: str, version: str) -> dict[str, Any]:
    """Describes a model or an adapter; raises BlockyardError MODEL_NOT_FOUND."""
    check_model(generation, name, version)
    return {
        "name": name or generation.model_of("").name,
        "versions": [MODEL_VERSION],
        "platform": NAME,
        "inputs": [
            {"name": each, "datatype": datatype, "shape": [-1 if each == "text_input" else 1]}
            for each, datatype in INPUTS.items()
        ],
        "outputs": [{"name": each, "datatype": kind.datatype, "shape": [-1]} for each, kind in OUTPUTS.items()],
    }


def check_model(generation: GenerationService, name: str, version: str) -> None:
    """Raises BlockyardError MODEL_NOT_FOUND if a model is not served, or not in this version."""
    generation.resolve_model(name)
    if not is_version(version):
        description = f"{quote(version)} is not served; {MODEL_VERSION!r} is"
        raise invalid([Violation("version", description, Reason.MODEL_NOT_FOUND)])
