"""Mistakes that were planted in the product, each a patch beside this file, and the search for a seed that finds one.

A simulation that finds nothing may be blind. So each of these mistakes has to be found by some of the first seeds. A
patch begins with a sentence that says what is wrong with the product once it is applied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kit.processes.system import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDER = Path(__file__).parent
# What a scenario executes, and so what patches may change.
COPIED = ("blockyard", "gateway", "scheduler_service", "tests/kit")
# What was noticed of a mistake that was not found.
NOT_FOUND = "nothing"
# What it only reads.
LINKED = ("models",)


@dataclass(frozen=True)
class Planted:
    """A mistake. `sentence`: what is wrong."""

    name: str
    sentence: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.patch"


@dataclass(frozen=True)
class Finding:
    """The first seed that finds a mistake. `seed`: None: none of them did."""

    planted: Planted
    seed: int | None
    num_seeds: int
    seconds: float
    violation: str = ""


def find_planted(names: Sequence[str] = ()) -> list[Planted]:
    """Lists the mistakes with these names, or all."""
    found = {path.stem: path.read_text().partition("\n")[0] for path in sorted(FOLDER.glob("*.patch"))}
    return [Planted(name, found[name]) for name in names or found]


def applies(planted: Planted) -> bool:
    """Whether the patch still fits the product as it is."""
    command = ["git", "apply", "--check", "-C1", str(planted.path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def plant(planted: Planted, folder: Path) -> None:
    """Makes a copy of the product with a mistake in it."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "planted"))
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    # Git looks for no repository around the folder, whose ignored paths it would leave as they are.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", "-C1", str(planted.path)], cwd=folder, env=environment, check=True)


def search(planted: Planted, folder: Path, seeds: range, seconds: float) -> Finding:
    """Plays seeds with a mistake, in a copy made by `plant`, until one finds it. That seed has to find it twice.

    A seed that fails without the mistake too does not count.
    """
    begin, first = time.monotonic(), seeds.start
    while (left := seconds - (time.monotonic() - begin)) > 0 and first < seeds.stop:
        answer = _play(folder, range(first, seeds.stop), left)
        violations, last = answer["violations"], answer["seed"]
        if not violations:
            return Finding(planted, None, last + 1 - seeds.start, time.monotonic() - begin)
        if not _play(ROOT, range(last, last + 1), seconds)["violations"]:
            again = _play(folder, range(last, last + 1), seconds)["violations"]
            assert again == violations, f"seed {last} found {violations}, and then {again}"
            return Finding(planted, last, last + 1 - seeds.start, time.monotonic() - begin, violations[0])
        first = last + 1
    return Finding(planted, None, first - seeds.start, time.monotonic() - begin)


def _play(folder: Path, seeds: range, seconds: float) -> Any:
    """Plays seeds in a process that imports the product from a folder, until one fails or the time is over."""
    command = [sys.executable, str(FOLDER / "seeds.py"), str(seeds.start), str(seeds.stop), str(seconds)]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    # Addresses of objects and the folder differ from process to process.
    told = re.sub(r" at 0x[0-9a-f]+", "", done.stdout.splitlines()[-1].decode()).replace(f"{folder}/", "")
    return json.loads(told)


def write_table(findings: Sequence[Finding]) -> Iterator[str]:
    """Writes the findings as lines of Markdown."""
    yield "| mistake | what is wrong | found by seed | seeds played | seconds | what was noticed |"
    yield "|---|---|---|---|---|---|"
    for finding in findings:
        planted, seed = finding.planted, "–" if finding.seed is None else finding.seed
        noticed = " ".join(finding.violation.split()).replace("|", "\\|")
        noticed = f"`{noticed[:160]}`" if noticed else NOT_FOUND
        yield (
            f"| [{planted.name}](../../{planted.path.relative_to(ROOT)}) | {planted.sentence} | {seed} "
            f"| {finding.num_seeds} | {finding.seconds:.0f} | {noticed} |"
        )
