"""Searches the planted mistakes: `python -m tests.kit.simulation.planted [NAME ...] [--seeds N] [--minutes M]`.

Prints a table, and ends with 1 if a mistake was not found. `--write` writes the table to docs/reliability/planted.md;
rows of mistakes that were not searched stay as they are there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit.processes.system import ROOT
from tests.kit.simulation.planted.mistakes import NOT_FOUND, Finding, find_planted, plant, search, write_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = ROOT / "docs" / "reliability" / "planted.md"
HEAD = """# Planted mistakes

A simulation that finds nothing may be blind. So these mistakes were planted in the product, one at a time, and seeds
were played from 0 on until one noticed. A seed that notices does so again each time. The numbers are from one core:

    python -m tests.kit.simulation.planted --write

"""


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.kit.simulation.planted")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the mistakes to search; none: all")
    parser.add_argument("--seeds", type=int, default=10_000, help="seeds to play for each")
    parser.add_argument("--minutes", type=float, default=120.0, help="time for each, on one core")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--write", action="store_true", help="write docs/reliability/planted.md")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    findings: list[Finding] = []
    for planted in find_planted(arguments.names):
        with tempfile.TemporaryDirectory() as folder:
            plant(planted, Path(folder))
            finding = search(planted, Path(folder), seeds, arguments.minutes * 60)
        findings.append(finding)
        print(list(write_table([finding]))[-1], flush=True)
    num_found = sum(finding.seed is not None for finding in findings)
    print(f"{num_found} of {len(findings)} were found")
    if arguments.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(HEAD + "\n".join(_merge(findings)) + "\n")
    return int(num_found < len(findings))


def _merge(findings: Sequence[Finding]) -> Iterator[str]:
    """Writes the table, with rows of the page for mistakes that were not searched."""
    head, rule, *rows = write_table(findings)
    known = {row.partition("]")[0]: row for row in PAGE.read_text().splitlines() if row.startswith("| [")}
    known |= {row.partition("]")[0]: row for row in rows}
    keys = [f"| [{planted.name}" for planted in find_planted()]
    table = [known[key] for key in keys if key in known]
    num_found = sum(not row.endswith(f"| {NOT_FOUND} |") for row in table)
    yield from (f"{num_found} of {len(keys)} were found.", "", head, rule, *table)


if __name__ == "__main__":
    sys.exit(main())
