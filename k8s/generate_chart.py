"""Writes the templates of the Helm chart in k8s/chart from what kustomize renders: python k8s/generate_chart.py

kustomize renders each overlay alone and with each component. What all renderings have is written once; what an overlay
or a component adds, changes or removes stands behind a condition on `.Values.overlay` or `.Values.components`.
chart_values.py says where the other values go. Tests compare what Helm renders with what kustomize renders.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from k8s.chart_text import Case, Conditions, Expression, Writer, conditional, grouped, joined  # noqa: E402
from k8s.chart_values import VALUES, Address  # noqa: E402
from tests.unit.deploy.manifests import (  # noqa: E402
    COMPONENTS,
    NEEDED_OVERLAYS,
    OVERLAYS,
    Manifests,
    rendered_set,
    template_of,
)

if TYPE_CHECKING:
    from tests.unit.deploy.manifests import Resource

CHART = HERE / "chart"
NOTE = "{{- /* Written by k8s/generate_chart.py. */}}"
# This component replaces the workload that the others patch, so the chart takes it as an overlay.
REPLACING = "leader-worker-set"
SHAPES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in OVERLAYS},
    REPLACING: (NEEDED_OVERLAYS[REPLACING], (REPLACING,)),
}
"""The overlay and the component of kustomize, by the name of the chart's overlay."""
OPTIONS = {re.sub(r"-(.)", lambda found: found[1].upper(), name): name for name in COMPONENTS if name != REPLACING}
"""The components by their names in `.Values.components`."""
EXCLUSIVE = ("modelFromHub", "modelVolume")
"""Two components that say where the model is."""


def goes_with(shape: str, option: str) -> bool:
    """Whether a component can be added to an overlay. KEDA's object scales a StatefulSet."""
    overlay, replacing = SHAPES[shape]
    needed = NEEDED_OVERLAYS.get(OPTIONS[option], overlay)
    return needed == overlay and not (replacing and option == "queueScaling")


CASES: tuple[Case, ...] = tuple(
    (shape, option) for shape in SHAPES for option in ("", *OPTIONS) if not option or goes_with(shape, option)
)
CONDITIONS = Conditions(CASES)
SETTINGS = """\
{{- /* The data of a ConfigMap: what is said by overlay and components, then `.Values.settings`. Data are texts. */}}
{{- define "blockyard.settings" }}
{{- $said := include (print "blockyard.settings." .name) .root | fromYaml }}
{{- range $name, $value := mergeOverwrite $said (get .root.Values.settings .name | default dict) }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}
"""


def rendering(case: Case) -> Manifests:
    """Returns the objects that kustomize renders for a case."""
    shape, option = case
    overlay, replacing = SHAPES[shape]
    return rendered_set(overlay, (*((OPTIONS[option],) if option else ()), *replacing))


def prepared(manifests: Manifests) -> dict[str, Resource]:
    """The objects by `Kind/name`, with expressions for images, the release, and a digest of the settings of a pod.

    kustomize has that digest in the names of ConfigMaps. Helm would delete those that pods still use.
    """
    manifests = Manifests(copy.deepcopy(manifests.resources))
    names = {name: re.sub(r"-[0-9a-z]{10}$", "", name) for name in manifests.of_kind("ConfigMap")}
    for service, workload in manifests.workloads.items():
        read = set[str]()
        for container in manifests.containers(service):
            container["image"] = _image(container["image"])
            for source in container.get("envFrom", []):
                source["configMapRef"]["name"] = names[source["configMapRef"]["name"]]
                read.add(source["configMapRef"]["name"].removeprefix("blockyard-"))
        data = " ".join(f"({_settings(name)})" for name in sorted(read))
        metadata = template_of(workload)["metadata"]
        metadata["annotations"] = {"checksum/settings": Expression(f"{{{{ print {data} | sha256sum | quote }}}}")}
        metadata["labels"] |= _labels()
    for item in manifests.resources:
        item["metadata"]["labels"] |= _labels()
        if item["kind"] == "ConfigMap":
            item["metadata"]["name"] = names[item["metadata"]["name"]]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in manifests.resources}


def _settings(name: str) -> str:
    return f'include "blockyard.settings" (dict "root" . "name" "{name}")'


def _image(image: str) -> Expression:
    name, _, tag = image.partition(":")
    given = f".Values.images.{name.removeprefix('blockyard-')}"
    return Expression(f'"{{{{ {given}.name | default "{name}" }}}}:{{{{ {given}.tag | default "{tag}" }}}}"')


def _labels() -> dict[str, Expression]:
    return {
        "app.kubernetes.io/instance": Expression("{{ .Release.Name | quote }}"),
        "app.kubernetes.io/managed-by": Expression("{{ .Release.Service | quote }}"),
        "app.kubernetes.io/version": Expression("{{ .Chart.AppVersion | quote }}"),
    }


def block_at(address: Address, node: Any) -> tuple[str, str] | None:
    """The block that is written for an address, and what includes it.

    Settings and objects that values are merged into are blocks, and the pods of workers, which are of two workloads.
    """
    if address[0].startswith("ConfigMap/") and address[1:] == ("data",) and any("BLOCKYARD_" in key for key in node):
        name = address[0].removeprefix("ConfigMap/blockyard-")
        return f"settings.{name}", f"{_settings(name)} | trim"
    if address == ("pod/blockyard-worker",):
        return "worker", 'include "blockyard.worker" . | trim'
    if address in VALUES and isinstance(node, dict):
        name = VALUES[address]
        said = f'include "blockyard.{name}" . | fromYaml'
        return name, f"mergeOverwrite ({said}) (.Values.{name} | default dict) | toYaml"
    return None


def templates() -> dict[str, str]:
    """The chart's templates, by the names of their files."""
    objects = {case: prepared(rendering(case)) for case in CASES}
    writer, files = Writer(CONDITIONS, block_at), dict[str, list[tuple[str, list[str]]]]()
    for name in sorted({name for those in objects.values() for name in those}):
        having = {case: those[name] for case, those in objects.items() if name in those}
        labels = next(iter(having.values()))["metadata"]["labels"]
        lines = ["---", *writer.map_lines(having, (name,), 0)]
        file = f"{labels['app.kubernetes.io/component']}.yaml"
        files.setdefault(file, []).append((CONDITIONS.of(having, objects), lines))
    made = {name: [NOTE, *grouped(entries)] for name, entries in files.items()}
    made |= {"_blocks.tpl": [NOTE, *SETTINGS.splitlines(), *_blocks(writer)], "refusals.yaml": [NOTE, *refusals()]}
    return {name: "\n".join(lines) + "\n" for name, lines in made.items()}


def _blocks(writer: Writer) -> list[str]:
    lines, written = list[str](), set[str]()
    # A block may include others.
    while left := [name for name in writer.blocks if name not in written]:
        for name in left:
            address, nodes = writer.blocks[name]
            lines += ["", f'{{{{- define "blockyard.{name}" }}}}', *writer.map_lines(nodes, address, 0), "{{- end }}"]
        written.update(left)
    return lines


def refusals() -> list[str]:
    """Returns the template that refuses components that do not go together, or not with the overlay."""
    lines = list[str]()
    for option in OPTIONS:
        if wrong := [shape for shape in SHAPES if not goes_with(shape, option)]:
            told = joined("and", [f".Values.components.{option}", *CONDITIONS.overlays(wrong, list(SHAPES))])
            message = f'(print "components.{option} does not go with the overlay " .Values.overlay)'
            lines += conditional([(told, [f"{{{{- fail {message} }}}}"])])
    told = joined("and", [f".Values.components.{option}" for option in EXCLUSIVE])
    message = " does not go with ".join(f"components.{option}" for option in EXCLUSIVE)
    return [*lines, *conditional([(told, [f'{{{{- fail "{message}" }}}}'])])]


def schema(values: Any, path: str = "") -> dict[str, Any]:
    """The schema of values: the names that exist. Which values are good Kubernetes knows."""
    if path == "overlay":
        return {"enum": list(SHAPES)}
    if isinstance(values, bool):
        return {"type": "boolean"}
    if not isinstance(values, dict):
        return {}
    if not values:
        return {"type": "object"}
    properties = {name: schema(value, f"{path}.{name}".lstrip(".")) for name, value in values.items()}
    # Charts that have this one within share these values with it.
    shared: dict[str, Any] = {} if path else {"global": {}}
    return {"type": "object", "properties": {**properties, **shared}, "additionalProperties": False}


def chart() -> dict[str, str]:
    """Returns the generated files of the chart: their texts by their paths in the chart."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    made = {f"templates/{name}": text for name, text in templates().items()}
    return {**made, "values.schema.json": json.dumps(schema(values), indent=2) + "\n"}


def main() -> None:
    for path, text in chart().items():
        (CHART / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
