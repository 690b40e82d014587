"""The fields of a LeaderWorkerSet that the manifests use, and what they may be.

In our own words, for it is not among the schemas of Kubernetes. The rendered component was held against the definition
of `leaderworkerset.x-k8s.io/v1` in LWS 0.6.0 to 0.10.0 (its config/crd/bases), with no unknown field allowed. What has
no line here is refused: look it up there first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Resource

_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": properties}


SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=_object(
        ("name",),
        name=_TEXT,
        namespace=_TEXT,
        labels=_TEXTS,
        # What one replica stands on alone, as the label of nodes that tells two of those apart.
        annotations=_object((), **{"leaderworkerset.sigs.k8s.io/exclusive-topology": _TEXT}),
    ),
    spec=_object(
        ("leaderWorkerTemplate",),
        replicas={"type": "integer", "minimum": 0, "maximum": 1_000_000},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=_object(
            ("workerTemplate",),
            size={"type": "integer"},
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
            # A pod's, of which Kubernetes has the schema.
            workerTemplate={"type": "object"},
        ),
    ),
)


def is_leader_worker_set(item: Resource) -> Iterator[str]:
    """Tells what the operator's definition would refuse, or drop without a word."""
    for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(item):
        yield f"{item['kind']} {item['metadata'].get('name')}: {error.json_path}: {error.message}"
