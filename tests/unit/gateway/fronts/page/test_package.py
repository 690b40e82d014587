"""The page's files are in the installed distribution and in the image."""

from __future__ import annotations

from pathlib import Path

from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from gateway.fronts.page.routes import load_assets

ROOT = Path(__file__).parents[5]


def test_a_wheel_has_them() -> None:
    distribution = Distribution({"src_root": str(ROOT)})
    apply_configuration(distribution, ROOT / "pyproject.toml")
    patterns = distribution.package_data["gateway.fronts.page"]
    packed = {file.name for pattern in patterns for file in (ROOT / "gateway" / "fronts" / "page").glob(pattern)}
    assert packed == set(load_assets())
    assert "gateway.fronts.page" in distribution.packages
