"""Extensions: classes that a worker is started with, whose operations clients call by name.

Defines the interface of an extension, and the view of the worker that an extension gets. Only the command line, and
never a request, names the modules that are imported.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from blockyard.contract.diagnostics import DIAGNOSTICS
from blockyard.contract.workers import WorkerState
from blockyard.settings import SettingsError
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from torch import Tensor

    from worker_service.models.loader import RunnableModel
    from worker_service.models.model_config import ModelConfig
    from worker_service.worker import Worker

    Operation = Callable[[bytes], bytes | Generator[None, None, bytes]]
    """What an extension can do. A generator yields between its pieces, where steps go on, and returns the result."""

log = EventLogger(__name__)

T = TypeVar("T")
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_][\w-]*")
# States with a model whose weights can be read.
READABLE = WorkerState.LOADED, WorkerState.CACHE_READY, WorkerState.RUNNING


class WorkerView:
    """The interface of a worker to its extensions."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def _loaded(self) -> RunnableModel:
        self._worker.require(*READABLE)
        assert self._worker.set_up.loaded is not None
        return self._worker.set_up.loaded

    @property
    def config(self) -> ModelConfig:
        """The network's sizes. Raises BlockyardError WRONG_STATE without a model."""
        return self._loaded().config

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields a copy of each tensor of this rank's share, by its name in a checkpoint, in the order of a step.

        Writes to a copy do not change the model. Call it between steps: in an operation, or in `run_between_steps`.
        Raises BlockyardError WRONG_STATE before the model is loaded, and while it sleeps.
        """
        for module in self._loaded().model.modules():
            yield from module.named_tensors()

    def run_between_steps(self, work: Callable[[], T]) -> T:
        """Runs work between two steps and returns its result: for a thread of the extension's own.

        In an operation, which already runs between two steps, it calls the work directly.
        """
        return self._worker.run_between_steps(work)


class WorkerExtension(Protocol):
    """An extension: a class that is made once, with a WorkerView, before the worker takes calls."""

    @property
    def name(self) -> str:
        """The name that callers use: letters, digits, `_` and `-`; no other extension has it."""
        ...

    @property
    def operations(self) -> Mapping[str, Operation]:
        """The operations of the extension by name. They run in the device thread between two steps, which wait.

        A long operation should be a generator function: steps run where it yields, and it returns its result.
        """
        ...


def load_extensions(places: str, view: WorkerView) -> dict[str, WorkerExtension]:
    """Makes the extensions that the command line names: `package.module:Class`, with commas between.

    Raises:
        SettingsError: one cannot be imported or made, is no extension, or has the name of another.
    """
    extensions: dict[str, WorkerExtension] = {}
    for place in filter(None, (part.strip() for part in places.split(","))):
        extension = _load(place, view)
        if extension.name in (*extensions, DIAGNOSTICS):
            raise SettingsError(f"--worker-extension {place}: another extension is named {extension.name!r}")
        extensions[extension.name] = extension
        log.info("an extension is loaded", extension=extension.name, operations=sorted(extension.operations))
    return extensions


def _load(place: str, view: WorkerView) -> WorkerExtension:
    if not _PLACE.fullmatch(place):
        raise SettingsError(f"--worker-extension {place!r}: give package.module:Class")
    module, _, name = place.partition(":")
    try:
        extension: Any = getattr(importlib.import_module(module), name)(view)
    except Exception as error:
        # This is foreign code: whatever it raises, the worker does not start without the extension.
        raise SettingsError(f"--worker-extension {place}: {type(error).__name__}: {error}") from error
    if not _is_extension(extension):
        problem = "it lacks a `name` of letters and digits, or a mapping `operations` of functions by such names"
        raise SettingsError(f"--worker-extension {place}: {problem}")
    return extension


def _is_extension(extension: Any) -> bool:
    try:
        names = [extension.name, *extension.operations]
        functions = list(extension.operations.values())
    except (AttributeError, TypeError):
        return False
    return all(isinstance(name, str) and _NAME.fullmatch(name) for name in names) and all(map(callable, functions))
