"""Packs edits of source code from this repository's commits into `blockyard/load/edits.json`, for `blockyard bench`.

    python benchmarks/kit/pack_edits.py [--number 24]

An edit is a commit's title, a part of a Python file before it and the same part after it: the first changes of the
commit that fit, with the lines around them. Commits are taken evenly over the history, one edit from each. Parts are as
long as the demo model's context allows for a prompt and an answer together.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "blockyard" / "load" / "edits.json"
FOLDERS = ("blockyard", "gateway", "scheduler_service", "worker_service")
MIN_CHARACTERS, MAX_CHARACTERS = 600, 1200
NUM_LINES_AROUND = 14
# Of the lines of a part, at most this share changes: more is no edit.
MAX_CHANGED = 0.4


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def find_edit(commit: str) -> dict[str, str] | None:
    """Returns the commit's first edit of a fitting size; None: it has none."""
    names = git("diff-tree", "--no-commit-id", "--name-only", "--diff-filter=M", "-r", commit, "--", *FOLDERS)
    for name in names.splitlines():
        if name.endswith(".py") and "_pb2" not in name:
            before, after = (git("show", f"{each}:{name}").splitlines(keepends=True) for each in (f"{commit}^", commit))
            for part in _cut(before, after):
                return {"title": git("show", "-s", "--format=%s", commit).strip(), "before": part[0], "after": part[1]}
    return None


def _cut(before: list[str], after: list[str]) -> Iterator[tuple[str, str]]:
    """Yields parts of a fitting size around changes."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(NUM_LINES_AROUND):
        first, last = group[0], group[-1]
        old, new = before[first[1] : last[2]], after[first[3] : last[4]]
        num_changed = sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in group if kind != "equal")
        sizes = [sum(map(len, each)) for each in (old, new)]
        if min(sizes) >= MIN_CHARACTERS and max(sizes) <= MAX_CHARACTERS and num_changed <= MAX_CHANGED * len(new):
            yield "".join(old), "".join(new)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=24, help="how many edits")
    number = parser.parse_args().number
    commits = git("log", "--no-merges", "--format=%h", "--diff-filter=M", "--", *FOLDERS).split()
    edits: list[dict[str, str]] = []
    for place in range(number):
        begin, end = place * len(commits) // number, (place + 1) * len(commits) // number
        edit = next((edit for commit in commits[begin:end] if (edit := find_edit(commit)) is not None), None)
        if edit is not None:
            edits.append(edit)
    TARGET.write_text(json.dumps(edits, indent=0) + "\n")
    print(f"{len(edits)} edits, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
