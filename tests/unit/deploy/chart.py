"""The Helm chart as Helm renders it, by Helm's own library and without a cluster.

Helm runs in a process of its own: its library is written in Go, whose threads and signal handlers stay in a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import yaml

from k8s.chart_text import below, identity
from k8s.generate_chart import CHART, OPTIONS, REPLACING
from tests.unit.deploy.manifests import Manifests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8s.chart_values import Address

RELEASE = "ours"
# What Helm and kustomize each say in their way.
OWNED = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "checksum/settings")
Values = dict[str, Any]

_RENDER = """
import json, sys
from helm_python import Chart, HelmError
answers = []
with Chart.load(sys.argv[1]) as chart:
    for values in json.load(sys.stdin):
        try:
            chart.validate_schema(values)
            answers.append(chart.render(values, name=sys.argv[2], namespace="blockyard"))
        except HelmError as error:
            answers.append(str(error))
json.dump(answers, sys.stdout)
"""
_LINT = """
import json, sys
from helm_python import lint
json.dump(lint(sys.argv[1], json.load(sys.stdin), strict=True), sys.stdout)
"""


def _helm(program: str, *arguments: str, given: Any) -> Any:
    command = [sys.executable, "-c", program, str(CHART), *arguments]
    done = subprocess.run(command, input=json.dumps(given), check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def render(*values: Values) -> list[Manifests | str]:
    """What Helm makes of each of several values: the objects, or why it refuses."""
    return [
        answer if isinstance(answer, str) else _parsed(answer) for answer in _helm(_RENDER, RELEASE, given=[*values])
    ]


def render_one(values: Values) -> Manifests:
    """What Helm makes of values that it takes."""
    (made,) = render(values)
    assert isinstance(made, Manifests), made
    return made


def _parsed(files: dict[str, str]) -> Manifests:
    documents = (item for text in files.values() for item in yaml.load_all(text, yaml.CSafeLoader))
    return Manifests(tuple(item for item in documents if item))


def lint() -> list[dict[str, Any]]:
    """What `helm lint --strict` tells, of warnings and worse."""
    return [message for message in _helm(_LINT, given={})["messages"] if message["severity"] > 1]


def values_of(overlay: str, components: tuple[str, ...]) -> Values:
    """The values that stand for an overlay of kustomize with components."""
    options = {option: True for option, name in OPTIONS.items() if name in components}
    return {"overlay": REPLACING if REPLACING in components else overlay, "components": options}


def leaves(manifests: Manifests) -> dict[Address, Any]:
    """All that is said, by its address: without the digests in the names of ConfigMaps, and without what is OWNED."""
    text = json.dumps(manifests.resources)
    for name in manifests.of_kind("ConfigMap"):
        text = text.replace(json.dumps(name), json.dumps(re.sub(r"-[0-9a-z]{10}$", "", name)))
    objects = {f"{item['kind']}/{item['metadata']['name']}": item for item in json.loads(text)}
    return {
        address: value
        for name, item in objects.items()
        for address, value in _leaves(item, (name,))
        if address[-1] not in OWNED
    }


def _leaves(node: Any, address: Address) -> Iterator[tuple[Address, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, below(address, key))
    elif isinstance(node, list) and any(isinstance(element, dict) for element in node):
        for element in node:
            yield from _leaves(element, (*address, identity(element)))
    else:
        yield address, node
