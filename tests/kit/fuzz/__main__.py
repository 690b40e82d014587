"""Runs targets: `python -m tests.kit.fuzz [--cases 100000] [--seed 1] [target …]`. Prints what became of their cases.

Ends with 1 if anything was a surprise: an error that is not typed, or BUG.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

from tests.kit.fuzz.targets import TARGETS, fuzz


def main() -> int:
    """Runs the targets one after another."""
    parser = argparse.ArgumentParser("fuzz")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    arguments = parser.parse_args()
    # Errors that are expected here fill screens.
    logging.disable(logging.CRITICAL)
    num_surprises = 0
    for name in arguments.targets or TARGETS:
        begin = time.perf_counter()
        report = asyncio.run(fuzz(name, arguments.cases, arguments.seed))
        told = [f"{report}; {time.perf_counter() - begin:.0f} s"]
        told += [f"  {count} x {surprise}" for surprise, count in report.surprises.most_common(10)]
        sys.stdout.write("\n".join([*told, *report.notes, *report.traces]) + "\n")
        sys.stdout.flush()
        num_surprises += sum(report.surprises.values())
    return 1 if num_surprises else 0


if __name__ == "__main__":
    sys.exit(main())
