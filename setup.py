"""Puts the demo model, which lies beside the packages here, into a wheel. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class BuildWithDemoModel(build_py):
    """Copies the model's files, but not the programs that made them."""

    def run(self) -> None:
        """Builds."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "blockyard", "demo_model")
            folder.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                shutil.copy(ROOT / "models" / "demo" / name, folder)


setup(cmdclass={"build_py": BuildWithDemoModel})
