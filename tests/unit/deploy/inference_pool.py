"""The fields of an InferencePool that the manifests use, and what they may be.

In our own words, for it is not among the schemas of Kubernetes, and no package of PyPI, npm or Debian has it. Written
after the definition of `inference.networking.k8s.io/v1` in the Gateway API inference extension, main of August 2026
(config/crd/bases at 84436a96). What has no line here is refused: look it up there first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests, Resource

API_GROUP = "inference.networking.k8s.io"
# The label of a pod that tells an endpoint picker which names its metrics have.
ENGINE_LABEL = f"{API_GROUP}/engine-type"

_TEXT = {"type": "string"}
_LABEL = {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": properties}


_PORT = _object(("number",), number={"type": "integer", "minimum": 1, "maximum": 65535})

SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": f"{API_GROUP}/v1"},
    kind={"const": "InferencePool"},
    metadata=_object(("name",), name=_TEXT, namespace=_TEXT, labels={"type": "object", "additionalProperties": _LABEL}),
    spec=_object(
        ("selector", "targetPorts"),
        selector=_object(
            ("matchLabels",),
            matchLabels={"type": "object", "additionalProperties": _LABEL, "minProperties": 1, "maxProperties": 64},
        ),
        # The first release of v1 took one port only.
        targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 1},
        # The kind is Service where none is given, and a Service needs a port.
        endpointPickerRef=_object(
            ("name", "port"),
            name={"type": "string", "minLength": 1, "maxLength": 253},
            port=_PORT,
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)


def is_inference_pool(item: Resource) -> Iterator[str]:
    """Reports what the definition of the extension would refuse, or drop without a word."""
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(item):
        yield f"{item['kind']} {item['metadata'].get('name')}: {error.json_path}: {error.message}"


def pools_what_serves(manifests: Manifests) -> Iterator[str]:
    """A pool has the gateways' pods, at their HTTP port, which has the metrics that a picker reads by vLLM's names."""
    for name, pool in manifests.of_kind("InferencePool").items():
        selector, labels = pool["spec"]["selector"]["matchLabels"], manifests.labels("gateway")
        if not selector.items() <= labels.items():
            yield f"InferencePool {name}: {selector} does not select the gateways"
        if pool["spec"]["targetPorts"] != [{"number": manifests.ports("gateway")["http"]}]:
            yield f"InferencePool {name}: {pool['spec']['targetPorts']}"
        if labels.get(ENGINE_LABEL) != "vllm":
            yield f"InferencePool {name}: the gateways' label {ENGINE_LABEL} is {labels.get(ENGINE_LABEL)}"
        if manifests.configured(manifests.container("gateway")).get("BLOCKYARD_VLLM_METRIC_NAMES") != "true":
            yield f"InferencePool {name}: the gateways' metrics do not have vLLM's names"
