"""Builds a wheel of this source, from a copy of it, since setuptools leaves things lying about."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from blockyard_kernels.cpu.build import built_folder

ROOT = Path(__file__).parents[3]
PARTS = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels", "models")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def build_wheel(folder: Path, *, has_compiler: bool = True) -> tuple[Path, str]:
    """Builds it with the setuptools of this environment and the kernels that `make setup` compiled.

    Returns the wheel's path, and what pip and setuptools wrote.
    """
    source = folder / "source"
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "built"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    environment = os.environ | {"BLOCKYARD_KERNELS_DIR": str(built_folder().parent)}
    if not has_compiler:
        environment |= {"PATH": str(folder), "CXX": ""}
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    (wheel,) = folder.glob("*.whl")
    return wheel, output
