"""Names the files that a plain request passes through: `python -m tests.kit.house.request_trace`.

Starts the three services, has them answer one streamed request of 8 tokens to warm up, and traces three more, one after
another. A file counts where one of its functions ran for each of them: what happens to run beside one, as a timer's
work does on a busy machine, is not the request's.
"""

from __future__ import annotations

import json
import signal
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard import Client
from blockyard.model_files import DEMO_FOLDER
from tests.kit.house import traced_service
from tests.kit.processes.system import System
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Generator

PRODUCT = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels")
SERVICES = ("gateway", "scheduler", "worker")
SAMPLER = "worker_service/sampling/sampler.py"
NUM_TOKENS = 8
NUM_TRACED = 3
# Parts of paths that belong to features for which a plain request does not ask.
FEATURES = (
    "adapter",
    "anthropic",
    "beam",
    "bad_words",
    "dialect",
    "draft",
    "fill_in_middle",
    "grammar",
    "lora",
    "pooling",
    "responses",
    "tenant",
    "thinking",
    "virtual_tokens",
    "windows",
)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The files of one request.

    Attributes:
        to_first_sample: files of each service whose first call was before the worker sampled the first token.
        whole: all files of each service.
    """

    to_first_sample: dict[str, frozenset[str]]
    whole: dict[str, frozenset[str]]

    def unused_features(self) -> list[str]:
        """Files before the first token that belong to features which the request does not use."""
        files = frozenset().union(*self.to_first_sample.values())
        return sorted(name for name in files if any(part in name for part in FEATURES))


def trace_request(folder: Path) -> RequestTrace:
    """Runs the system and returns the trace; `folder` gets the services' logs."""
    outputs = {name: folder / f"{name}.trace" for name in SERVICES}
    with _traced(folder, outputs) as system, Client(system.grpc_target) as client:
        _stream(client)
        traces = [_trace_one(system, outputs, client) for _ in range(NUM_TRACED)]
    return RequestTrace(
        _in_each([trace.to_first_sample for trace in traces]), _in_each([trace.whole for trace in traces])
    )


def _trace_one(system: System, outputs: dict[str, Path], client: Client) -> RequestTrace:
    _signal_all(system, outputs, signal.SIGUSR1)
    _stream(client)
    _signal_all(system, outputs, signal.SIGUSR2)
    calls = {name: _product_calls(outputs[name]) for name in SERVICES}
    sampled_at = calls["worker"][SAMPLER]
    return RequestTrace(
        {name: frozenset(file for file, when in each.items() if when <= sampled_at) for name, each in calls.items()},
        {name: frozenset(each) for name, each in calls.items()},
    )


def _in_each(files: list[dict[str, frozenset[str]]]) -> dict[str, frozenset[str]]:
    return {name: frozenset.intersection(*(each[name] for each in files)) for name in SERVICES}


@contextmanager
def _traced(folder: Path, outputs: dict[str, Path]) -> Generator[System]:
    environments = {name: {traced_service.VARIABLE: str(output)} for name, output in outputs.items()}
    with System(DEMO_FOLDER, folder, launcher=traced_service.__name__, environments=environments) as system:
        yield system


def _stream(client: Client) -> None:
    with client.stream("def read_lines(path):", max_tokens=NUM_TOKENS, ignore_eos=True) as stream:
        assert "".join(stream.text_deltas())


def _signal_all(system: System, outputs: dict[str, Path], number: signal.Signals) -> None:
    """Signals every service, and waits until each has written its file."""
    for name, output in outputs.items():
        output.unlink(missing_ok=True)
        system.services[name].process.send_signal(number)
        wait_until(output.exists)


def _product_calls(output: Path) -> dict[str, int]:
    calls: dict[str, int] = json.loads(output.read_text())
    return {name: when for name, when in calls.items() if name.split("/")[0] in PRODUCT}


def main() -> None:
    """Prints the counts and the files."""
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_request(Path(folder))
    for title, files in (("to the first sample", trace.to_first_sample), ("in all", trace.whole)):
        each = ", ".join(f"{name} {len(files[name])}" for name in SERVICES)
        print(f"{title}: {len(frozenset().union(*files.values()))} files ({each})")
    print("of unused features:", *trace.unused_features(), sep="\n  ")
    print("to the first sample:", *sorted(frozenset().union(*trace.to_first_sample.values())), sep="\n  ")


if __name__ == "__main__":
    main()
