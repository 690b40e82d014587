from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from blockyard import telemetry
from tests.kit.cut import cut
from tests.kit.processes import nursery

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


# A shell's background job, as some runners start this, is told to ignore SIGINT, and so are all its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long it takes to make and to try an example says how busy the machine is. Each run draws examples of its own: half
# as many as `make whole` where a test names no number.
settings.register_profile(
    "blockyard",
    deadline=None,
    max_examples=100 if os.environ.get("BLOCKYARD_TEST_WHOLE") else 50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("blockyard")
# Tests kill and stop peers on purpose, which gRPC tells on standard error. It looks when it is first used.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
telemetry.quiet_grpc()
# Many processes share the cores: a thread of OpenMP that waits by spinning takes what others would compute with.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Where it is installed, jsonschema makes 38 parsers of it when it is imported, for formats of which no test asks.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# Without a GPU Triton interprets. It looks when it is imported, which libraries do before the first of our tests.
if os.environ.get("BLOCKYARD_TEST_DEVICE") == "cpu" or not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


# Lists of running systems, logs and histories belong to this run alone.
_STATE = tempfile.mkdtemp(prefix="blockyard-state-")
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE
os.environ.pop("XDG_RUNTIME_DIR", None)
# One for all processes of pytest-xdist.
os.environ.setdefault(nursery.ADDRESS_VARIABLE, f"{_STATE}/nursery")


class LoopErrors(logging.Handler):
    """Keeps what event loops say of callbacks and tasks that failed where nobody looked."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def _is_no_late_event(record: logging.LogRecord) -> bool:
    """Leaves out what gRPC's one thread says of a call that was cancelled, where its loop is closed by now.

    A cancelled call is over at once for whoever cancelled it. Its operations end later, for which nobody can wait, and
    gRPC then calls a loop that only a process with several loops, one after another, has closed.
    """
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue._handle_events" not in record.getMessage() or "loop is closed" not in str(error)


LOOP_ERRORS = LoopErrors()
logging.getLogger("asyncio").addFilter(_is_no_late_event)
logging.getLogger("asyncio").addHandler(LOOP_ERRORS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fails a test in which a loop's callback or task failed where nobody looked."""
    result = yield
    texts, LOOP_ERRORS.texts = LOOP_ERRORS.texts, []
    assert not texts, "\n".join(texts)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Makes what pytest does for each test cheaper.

    The collector of garbage is kept from what is collected: a million objects, which stay to the end. And pytest, which
    attaches its two handlers three times for each test, has only the root to attach them to, not the dozens of loggers
    of torch that do not propagate.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undoes what a test's `configure_logging` did to this process, on which the next test's `caplog` depends."""
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in telemetry._LOCAL)]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        # To set one forgets what all loggers know.
        if logger.level != level:
            logger.setLevel(level)


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        yield folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cut(config, items)
