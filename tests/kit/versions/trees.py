"""Other versions of the product, each in a folder of its own: one that is made of this tree, and earlier commits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.kit.versions import run_service

ROOT = Path(__file__).parents[3]
PACKAGES = ("blockyard", "gateway", "blockyard_kernels", "scheduler_service", "worker_service")
# Of commits from before it was renamed.
FORMER_PACKAGES = ("kernels",)
COMPILE_SECONDS = 1200
_NUMBER = 500_000
_MESSAGE = re.compile(r"^( *message \w+ \{)", re.MULTILINE)
_ENUM = re.compile(r"^( *enum \w+ \{)", re.MULTILINE)
_ZERO = re.compile(r"^( *)(\w+)_UNSPECIFIED = 0;", re.MULTILINE)


def make_newer_version(folder: Path) -> Path:
    """Makes a version whose messages each have one more field, and whose enums each have one more value.

    Returns its folder. Its services fill the new field in each message that they send.
    """
    for package in PACKAGES:
        # Other processes may write compiled sources at this moment, each under such a name before its own.
        ignored = shutil.ignore_patterns("built", "*.pyc.*")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copytree(ROOT / "protos", folder / "protos")
    for path in folder.glob("protos/blockyard/**/*.proto"):
        path.write_text(_add_to_proto(path.read_text()))
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["sh", "protos/generate.sh"], cwd=folder, env=environment, check=True, timeout=100)
    _complete(folder)
    return folder


def _add_to_proto(text: str) -> str:
    assert len(_ENUM.findall(text)) == len(_ZERO.findall(text))
    text = _MESSAGE.sub(rf"\1 string {run_service.FIELD} = {_NUMBER};", text)
    return _ZERO.sub(rf"\g<0>\n\1\2_FROM_LATER_VERSION = {_NUMBER};", text)


def unpack_commit(commit: str, folder: Path) -> Path:
    """Unpacks the product as it was at a commit; returns its folder. Compiles its kernels where they have changed."""
    folder.mkdir()
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    packages = {*PACKAGES, *FORMER_PACKAGES} & set(listed.stdout.split())
    archive = subprocess.run(["git", "archive", commit, *packages], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    _complete(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    build = [sys.executable, "-P", "-m", f"{_kernels_of(folder).name}.cpu.build"]
    subprocess.run(build, cwd=folder, env=environment, check=True, timeout=COMPILE_SECONDS)
    return folder


def _complete(folder: Path) -> None:
    """Adds the program that runs its services, and the compiled kernels: the folder of each is named by its source."""
    (_kernels_of(folder) / "cpu" / "built").symlink_to(ROOT / "blockyard_kernels" / "cpu" / "built")
    shutil.copy(run_service.__file__, folder)


def _kernels_of(folder: Path) -> Path:
    return next(folder / name for name in (*PACKAGES, *FORMER_PACKAGES) if (folder / name / "cpu").is_dir())
