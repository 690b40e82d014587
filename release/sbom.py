"""Writes what is in images, as CycloneDX: python release/sbom.py FOLDER IMAGE…

An image is started once, without a network, to hand out the metadata of its Python packages and Debian's list of
packages. cyclonedx-py reads the former; the latter are added here, and the whole is checked against CycloneDX's schema.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

SPEC_VERSION = "1.6"
# Runs in the image: writes a tar of what is read here.
COLLECT = """
import glob, io, os, platform, sys, sysconfig, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    for folder in glob.glob(os.path.join(sysconfig.get_path("purelib"), "*.dist-info")):
        tar.add(folder, os.path.join("python", os.path.basename(folder)))
    for path in ("/var/lib/dpkg/status", "/usr/lib/os-release"):
        if os.path.exists(path):
            tar.add(path, os.path.basename(path))
    version = platform.python_version().encode()
    entry = tarfile.TarInfo("version")
    entry.size = len(version)
    tar.addfile(entry, io.BytesIO(version))
"""


def collect(image: str, folder: Path) -> None:
    """Puts an image's lists of packages into a folder."""
    limits = ["--rm", "--read-only", "--network=none", "--cap-drop=ALL"]
    command = ["docker", "run", *limits, image, "python", "-c", COLLECT]
    packed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")


def describe_python(folder: Path) -> dict[str, Any]:
    """Has cyclonedx-py describe the Python packages in a folder's `python`."""
    interpreter = folder / "interpreter"
    # All that cyclonedx-py asks of an interpreter is its search path.
    interpreter.write_text(f"#!/bin/sh\necho '{json.dumps([str(folder / 'python')])}'\n", encoding="utf-8")
    interpreter.chmod(0o755)
    command = [
        str(Path(sys.executable).with_name("cyclonedx-py")),
        "environment",
        "--no-validate",
        "--output-reproducible",
    ]
    command += ["--spec-version", SPEC_VERSION, str(interpreter)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def read_stanzas(text: str) -> Iterator[dict[str, str]]:
    """Reads the fields of each package in Debian's format, without what continues on a further line."""
    for stanza in text.split("\n\n"):
        lines = [line.partition(": ") for line in stanza.splitlines() if not line.startswith(" ")]
        if fields := {name: value for name, _, value in lines}:
            yield fields


def describe_debian(folder: Path) -> list[dict[str, Any]]:
    """Lists Debian's packages by a folder's `status` and `os-release`; none where the image has no such list."""
    status = folder / "status"
    if not status.exists():
        return []
    lines = (folder / "os-release").read_text(encoding="utf-8").splitlines()
    release = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    components: list[dict[str, Any]] = []
    for fields in read_stanzas(status.read_text(encoding="utf-8")):
        if fields["Status"].endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/{release['ID']}/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            purl += f"&distro={release['ID']}-{release.get('VERSION_ID', 'unstable')}"
            components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    return components


def describe_interpreter(folder: Path) -> dict[str, Any]:
    """Describes Python itself, by its version in a folder's `version`."""
    version = (folder / "version").read_text(encoding="utf-8")
    purl = f"pkg:generic/python@{version}"
    return {"type": "platform", "bom-ref": purl, "name": "CPython", "version": version, "purl": purl}


def describe(image: str, folder: Path) -> dict[str, Any]:
    """Describes an image whose lists of packages lie in a folder."""
    bom = describe_python(folder)
    name, _, tag = image.rpartition("/")[2].partition(":")
    bom["components"] = [*bom.get("components", []), describe_interpreter(folder), *describe_debian(folder)]
    bom["metadata"]["component"] = {"type": "container", "bom-ref": image, "name": name, "version": tag or "latest"}
    return bom


def check(text: str) -> None:
    """Raises ValueError if a text breaks CycloneDX's schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.from_version(SPEC_VERSION)).validate_str(text):
        raise ValueError(str(error))


def main() -> None:
    target, *images = sys.argv[1:]
    Path(target).mkdir(parents=True, exist_ok=True)
    for image in images:
        with tempfile.TemporaryDirectory() as folder:
            collect(image, Path(folder))
            bom = describe(image, Path(folder))
        text = json.dumps(bom, indent=2) + "\n"
        check(text)
        path = Path(target, f"{image.rpartition('/')[2].replace(':', '-')}.cdx.json")
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}: {len(bom['components'])} packages\n")


if __name__ == "__main__":
    main()
