"""Which extensions a worker starts with, and which it refuses to start with."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from blockyard.errors import BlockyardError, Reason
from blockyard.settings import SettingsError
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.worker_extension import Example
from tests.unit.docs.commands import ROOT, blocks_of
from tests.unit.worker_service.driver import running_worker
from worker_service.operations.extensions import WorkerView, load_extensions
from worker_service.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

KIT = "tests.kit.worker_extension"


def test_extensions_are_those_of_the_command_line() -> None:
    view = WorkerView(Worker())
    assert load_extensions("", view) == {}
    [(name, extension)] = load_extensions(f" {KIT}:Example ,", view).items()
    assert (name, isinstance(extension, Example)) == ("example", True)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ("json", "give package.module:Class"),
        ("../../evil:Class", "give package.module:Class"),
        ("no_such_module:Class", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{KIT}:NoSuchClass", "AttributeError: "),
        (f"{KIT}:NoExtension", "it lacks a `name` of letters and digits"),
        (f"{KIT}:Breaks", "WRONG_STATE: "),
        (f"{KIT}:Example,{KIT}:Again", "another extension is named 'example'"),
        (f"{KIT}:Diagnostics", "another extension is named 'diagnostics'"),
    ],
)
def test_what_is_none_is_refused(places: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_extensions(places, WorkerView(Worker()))
    assert told in str(caught.value)


def test_a_thread_of_an_extension_works_between_steps() -> None:
    worker = Worker()
    worker.start()
    view = WorkerView(worker)
    assert view.run_between_steps(lambda: threading.current_thread().name) == "device"
    assert view.run_between_steps(lambda: view.run_between_steps(threading.get_ident)) != threading.get_ident()

    def fail() -> None:
        raise BlockyardError(Reason.BUG, "its own")

    with pytest.raises(BlockyardError, match="its own"):
        view.run_between_steps(fail)


async def test_the_guides_extension_is_one(
    socket_folder: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/guides/inspect.md").read_text()
    [program] = [block.text for block in blocks_of(page) if block.text.startswith('"""largest.py')]
    (tmp_path / "largest.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    async with running_worker(socket_folder, worker_extension="largest:Largest") as worker:
        await worker.load(model)
        request = pb.CallExtensionRequest(extension="largest", operation="weight", payload=b"o_proj.weight")
        name, largest = json.loads((await worker.stub.CallExtension(request)).result)
    tensors = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if "o_proj" in name}
    assert largest == max(float(tensor.abs().max()) for tensor in tensors.values()) == float(tensors[name].abs().max())
