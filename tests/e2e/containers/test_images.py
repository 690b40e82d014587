"""The two images: what is in them, what is not, who runs, and that each says by itself whether it is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.containers.conftest import BASE_IMAGE, TAG
from tests.kit.processes.containers import is_healthy, wait_until

if TYPE_CHECKING:
    from docker import DockerClient
    from tests.kit.processes.containers import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.usefixtures("project")]
CONTROL, WORKER = f"blockyard-control:{TAG}", f"blockyard-worker:{TAG}"
MEGABYTE = 1_000_000
MAX_CONTROL_BYTES = 150 * MEGABYTE
NOT_FOUND = "import shutil, importlib.util as i; print([n for n in {modules} if i.find_spec(n)], shutil.which('c++'))"


def run(engine: DockerClient, image: str, program: str) -> str:
    """What a program in Python prints, in a container as the compose file makes them."""
    command = ["python", "-c", program]
    printed = engine.containers.run(image, command, remove=True, read_only=True, network_mode="none", cap_drop=["ALL"])
    return printed.decode().strip()


def test_what_the_images_add_to_their_base(engine: DockerClient, figures: list[str]) -> None:
    base = engine.images.get(BASE_IMAGE).attrs["Size"]
    added = {image: engine.images.get(image).attrs["Size"] - base for image in (CONTROL, WORKER)}
    figures.append(f"{BASE_IMAGE}: {base / MEGABYTE:.0f} MB")
    figures += [f"{image}: {num_bytes / MEGABYTE:.0f} MB more" for image, num_bytes in added.items()]
    assert 0 < added[CONTROL] <= MAX_CONTROL_BYTES


@pytest.mark.parametrize("image", [CONTROL, WORKER])
def test_nobody_runs_it(engine: DockerClient, image: str) -> None:
    program = "import os; print(os.getuid(), os.getgid(), os.access('.', os.W_OK))"
    assert run(engine, image, program) == "65532 65532 False"


def test_the_control_plane_has_neither_torch_nor_tools(engine: DockerClient) -> None:
    modules = ["torch", "numpy", "transformers", "pip", "setuptools", "blockyard_kernels", "worker_service"]
    assert run(engine, CONTROL, NOT_FOUND.format(modules=modules)) == "[] None"


def test_the_worker_has_neither_text_nor_tools(engine: DockerClient) -> None:
    modules = ["transformers", "tokenizers", "pip", "gateway", "scheduler_service"]
    assert run(engine, WORKER, NOT_FOUND.format(modules=modules)) == "[] None"


def test_the_worker_has_every_kernel(engine: DockerClient) -> None:
    imports = "from blockyard_kernels.cpu.build import INSTRUCTION_SETS, library_path"
    program = f"{imports}; print(all(library_path(name).is_file() for name in INSTRUCTION_SETS))"
    assert run(engine, WORKER, program) == "True"


def test_pip_was_told_nothing_that_stays(engine: DockerClient, project: Project) -> None:
    told = [project.environment.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")]
    for image in (CONTROL, WORKER):
        history = str(engine.images.get(image).history())
        assert "blockyard" in history
        assert not [value for value in told if value and value in history]


def test_a_worker_alone_becomes_healthy(engine: DockerClient) -> None:
    container = engine.containers.run(WORKER, detach=True, read_only=True, tmpfs={"/tmp": ""}, network_mode="none")
    try:
        wait_until(lambda: is_healthy(container))
        container.stop(timeout=15)
        assert container.wait()["StatusCode"] == 0, container.logs().decode()
    finally:
        container.remove(force=True)
