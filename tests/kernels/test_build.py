"""Building the kernels: at once by two, killed half-way, without a compiler; and which ones a processor is given.

The compiler is a script that copies the finished libraries, and stops half-way until a gate is opened.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.cpu import backend, build, library, processors
from blockyard_kernels.cpu.build import INSTRUCTION_SETS, library_path
from tests.kit.kernels.backends import build_kernels
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SECONDS = 30.0
COMPILER = """#!/bin/sh
case "$*" in
*-DBLOCKYARD_AMX*) name=amx ;;
*-mavx512bf16*) name=avx512_bf16 ;;
*-mavx512f*) name=avx512 ;;
*) name=avx2 ;;
esac
while [ "$1" != -o ]; do shift; done
head -c 10000 {finished}/$name.so > "$2"
echo $name >> {begun}
read _ < {gate}
tail -c +10001 {finished}/$name.so >> "$2"
"""


@dataclass
class Workshop:
    """A place to build in, with a compiler."""

    folder: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[str]]

    def start(self) -> subprocess.Popen[str]:
        """Starts a build as `make setup` does."""
        process = subprocess.Popen(
            [sys.executable, "-m", "blockyard_kernels.cpu.build"],
            cwd=ROOT,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def begun(self) -> list[str]:
        """What the compiler has been called for."""
        path = self.folder / "begun"
        return path.read_text().split() if path.exists() else []

    def release(self, process: subprocess.Popen[str]) -> None:
        """Lets all compilers go on until a build has ended."""
        gate = os.open(self.folder / "gate", os.O_RDWR)
        os.write(gate, b"\n" * 100)
        process.wait(SECONDS)
        os.close(gate)

    def built(self) -> dict[str, bytes]:
        """All that stands in the folder of this source, but the lock."""
        (folder,) = (self.folder / "built").iterdir()
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    build_kernels()
    script = tmp_path / "compiler"
    places = {"finished": library_path("avx2").parent, "begun": tmp_path / "begun", "gate": tmp_path / "gate"}
    script.write_text(COMPILER.format(**places))
    script.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    environment = {**os.environ, "CXX": str(script), "BLOCKYARD_KERNELS_DIR": str(tmp_path / "built")}
    workshop = Workshop(tmp_path, environment, [])
    yield workshop
    for process in workshop.processes:
        # Its compilers too, where it was killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finished() -> dict[str, bytes]:
    return {f"{name}.so": library_path(name).read_bytes() for name in INSTRUCTION_SETS}


def waits_for_a_lock(pid: int) -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and str(pid) in line.split() for line in lines)


def test_two_builds_at_once_build_once_and_both_end_well(workshop: Workshop) -> None:
    first = workshop.start()
    wait_until(lambda: len(workshop.begun()) == min(len(INSTRUCTION_SETS), os.cpu_count() or 1))
    assert not [name for name in workshop.built() if name.endswith(".so")], "what is half-written has no name yet"
    second = workshop.start()
    wait_until(lambda: waits_for_a_lock(second.pid))
    workshop.release(first)
    assert (first.wait(SECONDS), second.wait(SECONDS)) == (0, 0)
    assert sorted(workshop.begun()) == sorted(INSTRUCTION_SETS), "each was built once"
    assert workshop.built() == finished()


def test_a_build_that_was_killed_stops_no_other(workshop: Workshop) -> None:
    killed = workshop.start()
    wait_until(lambda: len(workshop.begun()) > 0)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(SECONDS)
    # Its compilers still run, and what they have written lies there.
    again = workshop.start()
    workshop.release(again)
    assert again.returncode == 0
    assert {name: content for name, content in workshop.built().items() if name.endswith(".so")} == finished()


def test_what_is_there_is_not_built_again(workshop: Workshop) -> None:
    for _ in range(2):
        workshop.release(workshop.start())
    assert len(workshop.begun()) == len(INSTRUCTION_SETS)


def test_a_compiler_that_refuses_fails_the_build_and_leaves_nothing(workshop: Workshop) -> None:
    (workshop.folder / "compiler").write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    process = workshop.start()
    _, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "no such flag" in told
    assert workshop.built() == {}


def test_without_a_compiler_the_build_says_what_that_means(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "BLOCKYARD_KERNELS_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "blockyard_kernels.cpu.build"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == (
        "no C++ compiler: workers on a CPU will use the reference kernels, which are slower; "
        "install g++, or the wheel for Linux on x86-64, which has the kernels compiled\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKYARD_KERNELS_DIR", str(tmp_path))


choose_backend = backend.choose_backend.__wrapped__


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_the_reference_serves_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_backend(torch.bfloat16, "auto", "none") is None
    assert "make setup builds them" in caplog.text
    with pytest.raises(ValueError, match="no kernels for avx2: this processor lacks it, or they were not built"):
        choose_backend(torch.bfloat16, "avx2", "none")


def test_a_dtype_that_the_kernels_lack_is_the_references(caplog: pytest.LogCaptureFixture) -> None:
    build_kernels()
    assert choose_backend(torch.float16, "auto", "none") is None
    assert "know no torch.float16" in caplog.text
    with pytest.raises(ValueError, match=r"the avx2 kernels know no torch\.float16"):
        choose_backend(torch.float16, "avx2", "none")


def test_only_what_is_built_is_available(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    supported = processors.available_instruction_sets()
    source = library_path(supported[-1])
    monkeypatch.setenv("BLOCKYARD_KERNELS_DIR", workshop.environment["BLOCKYARD_KERNELS_DIR"])
    assert processors.available_instruction_sets() == ()
    library_path(supported[-1]).parent.mkdir(parents=True)
    shutil.copy(source, library_path(supported[-1]))
    assert processors.available_instruction_sets() == supported[-1:]
    assert library.Library(supported[-1]).digest


def test_another_source_or_other_flags_are_built_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.built_folder()
    monkeypatch.setattr(build, "COMMON_FLAGS", (*build.COMMON_FLAGS, "-ffast-math"))
    assert build.built_folder() != before
    monkeypatch.undo()
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.built_folder() == before
    with (tmp_path / "csrc" / "team.h").open("a") as source:
        source.write("\n")
    assert build.built_folder() != before


def test_a_library_of_other_structures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build_kernels()

    class Shorter(ctypes.Structure):
        _fields_ = (("kind", ctypes.c_int32),)

    monkeypatch.setattr(library, "Op", Shorter)
    with pytest.raises(RuntimeError, match="build it anew"):
        library.Library("avx2")


@pytest.mark.parametrize("place", ["site-packages", "dist-packages"])
def test_an_installed_package_builds_into_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    digest = build.built_folder().name
    installed = tmp_path / place / "kernels" / "cpu" / "build.py"
    monkeypatch.delenv("BLOCKYARD_KERNELS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "__file__", str(installed))
    assert build.built_folder() == tmp_path / "cache" / "blockyard" / "kernels" / digest
    (installed.parent / "built").mkdir(parents=True)
    assert build.built_folder() == installed.parent / "built" / digest
