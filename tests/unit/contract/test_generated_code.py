"""The committed bindings are what the protos give, and the contract keeps the house's rules."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = [
    Path("blockyard/google_rpc/google/rpc"),
    *sorted({file.parent.relative_to(ROOT / "protos") for file in (ROOT / "protos/blockyard").rglob("*.proto")}),
]


def test_bindings_are_current(tmp_path: Path) -> None:
    subprocess.run(["sh", "protos/generate.sh", str(tmp_path)], cwd=ROOT, check=True, env=_environment(), timeout=60)
    for package in PACKAGES:
        made = sorted((tmp_path / package).glob("*_pb2*"))
        assert made
        for file in made:
            committed = ROOT / package / file.name
            assert committed.read_text() == file.read_text(), f"{committed} is not current: run `make protos`"


def _environment() -> dict[str, str]:
    return {"PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def test_control_plane_needs_no_torch() -> None:
    """The gateway and the scheduler run in an environment without torch: importing them must not try."""
    modules = [
        *("gateway.server", "gateway.fronts.openai.app", "scheduler_service.server"),
        *("blockyard", "blockyard.cli.main", "blockyard.client.sync", "blockyard.local.llm"),
    ]
    program = f"import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_imported_packages_are_declared() -> None:
    """Each extra names what its process imports (a missing one is found by an image, too late)."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(name.startswith("kernels") for name in project["dependencies"])
    assert set(project["optional-dependencies"]) == {
        *(
            "serve",
            "cli",
            "service",
            "gateway",
            "scheduler",
            "worker",
            "grammar",
            "transformers",
            "tracing",
            "dev",
            "release",
        )
    }
