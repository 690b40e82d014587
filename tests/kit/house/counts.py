"""Counts the house: `python -m tests.kit.house.counts [COMMIT ...]`, the working tree without a commit.

Prints for each: hand-written Python lines of each product package, public class names that stand in more than one
package, files that name a sampling parameter, and the share of comments that open with a fragment.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

PACKAGES = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels")
# A parameter that passes from the fronts to the sampler, as a new one would.
PARAMETER = re.compile(r"\brepetition_penalty\b")
CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)
COMMENT = re.compile(r"^\s*# (.*)$", re.MULTILINE)
FRAGMENT = re.compile(r"(Of|What|Who|Whose|That|Which|Those|So many|None|Nobody)\b")


def product_files(root: Path) -> dict[str, str]:
    """The text of each hand-written Python file of the product by its path."""
    paths = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return {str(path.relative_to(root)): path.read_text() for path in paths if "_pb2" not in path.name}


def lines_by_package(files: dict[str, str]) -> dict[str, int]:
    """Lines of each package."""
    counts: dict[str, int] = dict.fromkeys(PACKAGES, 0)
    for path, text in files.items():
        counts[path.split("/")[0]] += text.count("\n")
    return counts


def shared_class_names(files: dict[str, str]) -> list[str]:
    """Public class names that more than one package declares."""
    packages: dict[str, set[str]] = defaultdict(set)
    for path, text in files.items():
        for name in CLASS.findall(text):
            packages[name].add(path.split("/")[0])
    return sorted(name for name, where in packages.items() if len(where) > 1)


def files_of_a_parameter(root: Path, files: dict[str, str]) -> list[str]:
    """Files, protos among them, that name a sampling parameter."""
    protos = {str(path.relative_to(root)): path.read_text() for path in (root / "protos").rglob("*.proto")}
    return sorted(path for path, text in {**files, **protos}.items() if PARAMETER.search(text))


def fragments(files: dict[str, str]) -> tuple[int, int]:
    """Comments that open with a fragment, and all comments; lines that continue one count for themselves."""
    comments = [comment for text in files.values() for comment in COMMENT.findall(text)]
    return sum(1 for comment in comments if FRAGMENT.match(comment)), len(comments)


def report(root: Path) -> str:
    """The counts of a tree, for a person."""
    files = product_files(root)
    lines = lines_by_package(files)
    names, touched = shared_class_names(files), files_of_a_parameter(root, files)
    num_fragments, num_comments = fragments(files)
    return "\n".join(
        (
            f"lines: {sum(lines.values())} ({', '.join(f'{name} {count}' for name, count in lines.items())})",
            f"class names in more than one package: {len(names)} ({', '.join(names)})",
            f"files that name a sampling parameter: {len(touched)} ({', '.join(touched)})",
            f"comments that open with a fragment: {num_fragments} of {num_comments}",
        )
    )


def main() -> None:
    """Prints the counts of each commit that is named, or of the working tree."""
    if not sys.argv[1:]:
        print(report(Path.cwd()))
    for commit in sys.argv[1:]:
        archive = subprocess.run(("git", "archive", commit), capture_output=True, check=True).stdout
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
            print(f"{commit}:\n{report(Path(folder))}")


if __name__ == "__main__":
    main()
