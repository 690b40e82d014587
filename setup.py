"""Puts the demo model and the compiled kernels into a wheel. All else is in pyproject.toml.

The kernels make a wheel one for Linux on x86-64, of any Python: ctypes loads them. Elsewhere, and where there is no C++
compiler, the wheel has their source alone and fits every machine.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
KERNELS = Path("blockyard_kernels", "cpu")


def _load_builder() -> ModuleType:
    """Imports blockyard_kernels/cpu/build.py without its package, which needs torch."""
    spec = importlib.util.spec_from_file_location("kernels_build", ROOT / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def compiled_kernels() -> tuple[Path, ...]:
    """Compiles the kernels of all instruction sets, or finds them compiled; empty where that is impossible."""
    builder = _load_builder()
    compiler = builder.find_compiler()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        sys.stderr.write("the CPU kernels are for Linux on x86-64: this wheel has only their source\n")
    elif compiler is None:
        sys.stderr.write("no C++ compiler: this wheel has only the source of the CPU kernels\n")
    else:
        try:
            return tuple(builder.build(compiler))
        except subprocess.CalledProcessError:
            sys.stderr.write("the CPU kernels cannot be compiled here: this wheel has only their source\n")
    return ()


class BuildWithFiles(build_py):
    """Copies the model's files, without the programs that made them, and the compiled kernels."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            models = [ROOT / "models" / "demo" / name for name in FILES]
            self._copy(models, Path("blockyard", "demo_model"))
            for path in compiled_kernels():
                self._copy([path], KERNELS / "built" / path.parent.name)

    def _copy(self, paths: list[Path], folder: Path) -> None:
        target = Path(self.build_lib) / folder
        target.mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copy(path, target)


class WheelForPlatform(bdist_wheel):
    """Names the platform, but no Python, where the wheel has compiled kernels."""

    def run(self) -> None:
        has_kernels = bool(compiled_kernels())
        self.root_is_pure = not has_kernels
        # The command `install`, which this one runs, chooses the folder by it.
        self.distribution.has_ext_modules = lambda: has_kernels
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, name = super().get_tag()
        return "py3", "none", name


setup(cmdclass={"build_py": BuildWithFiles, "bdist_wheel": WheelForPlatform})
