"""Makes a page of what benchmarks/gpu_day.sh left: every time beside what the same machine could do at best.

    python -m benchmarks.gpu.report FOLDER [--write]

prints it; with --write it goes to benchmarks/results/gpu-<date>.md. What a stage did not come to is listed as missing.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
COPIES = {
    "bandwidth": "GB/s of copies on the device, read and written",
    "to_host": "GB/s to the host",
    "from_host": "GB/s from the host",
}


def read(path: Path) -> Any:
    """A stage's results; empty where it left none."""
    return json.loads(path.read_text()) if path.exists() else {}


def machine_section(folder: Path) -> list[str]:
    """What the machine is."""
    machine = read(folder / "machine.json")
    lines = [f"- {name}: {' '.join(str(value).split())}" for name, value in machine.get("machine", {}).items() if value]
    for name, rate in machine.get("ceilings", {}).items():
        told = f"{rate / 1e9:,.1f} {COPIES[name]}" if name in COPIES else f"{rate / 1e12:,.1f} TFLOP/s in {name}"
        lines.append(f"- at best {told}")
    if machine.get("machine", {}).get("is_dry"):
        lines = [
            "A dry run on a processor with tiny shapes: it shows that all of it works, and its times say nothing.",
            "",
            *lines,
        ]
    return ["## The machine", "", *(lines or ["Not measured."]), ""]


def stages_section(folder: Path) -> list[str]:
    """What became of each stage."""
    rows = [
        f"| {stage['name']} | {stage['outcome']} | {stage['seconds']} of {stage['limit']} s |"
        for stage in read(folder / "stages.json")
    ]
    return ["## Stages", "", "| stage | outcome | time |", "|---|---|---|", *rows, ""]


def tests_section(folder: Path) -> list[str]:
    """How many tests passed, and which did not."""
    path = folder / "tests.xml"
    if not path.exists():
        return ["## Tests", "", "No results.", ""]
    suites = ElementTree.parse(path).getroot().iter("testsuite")
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    bad: list[str] = []
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                bad.append(f"- {case.get('classname')}::{case.get('name')}")
    counts = ", ".join(f"{number} {name}" for name, number in total.items())
    return ["## Tests", "", f"{counts}.", "", *bad, *([""] if bad else [])]


def times_section(title: str, results: dict[str, Any]) -> list[str]:
    """A table of times, each with its share of the ideal."""
    rows: list[str] = []
    for name, result in results.items():
        if not isinstance(result, dict) or not {"seconds", "error"} & result.keys():
            continue
        if "error" in result:
            rows.append(f"| {name} | {result['error']} | | |")
            continue
        ideal = result.get("ideal_seconds")
        share = f"{100 * ideal / result['seconds']:.0f} %" if ideal else ""
        rows.append(
            f"| {name} | {milliseconds(result['seconds'])} | {milliseconds(ideal) if ideal else ''} | {share} |"
        )
    head = ["| | ms | ideal ms | share |", "|---|---|---|---|"]
    return [f"## {title}", "", *([*head, *rows] if rows else ["Not measured."]), ""]


def milliseconds(seconds: float) -> str:
    """A time as text."""
    return f"{1000 * seconds:,.3f}"


def instructions_section(found: Any) -> list[str]:
    """What the kernels that multiply were compiled to."""
    if not isinstance(found, list):
        return ["## Instructions of the compiled kernels", "", f"They were {found or 'not read'}.", ""]
    names = list(found[0])
    rows = [f"| {' | '.join(str(each.get(name)) for name in names)} |" for each in found]
    return [
        "## Instructions of the compiled kernels",
        "",
        f"| {' | '.join(names)} |",
        f"|{'---|' * len(names)}",
        *rows,
        "",
    ]


def products_section(found: dict[str, Any]) -> list[str]:
    """How products are made that keep a row's bits."""
    told = ", ".join(f"{name}: {value}" for name, value in found.items())
    return ["## Products in invariant mode", "", f"{told or 'None was probed'}.", ""]


def table_section(results: dict[str, Any]) -> list[str]:
    """Other launches of a kernel, the fastest first, beside the one that it has."""
    timed = {name: result for name, result in results.items() if "seconds" in result}
    now = {result["kernel"]: result["seconds"] for result in timed.values() if result["is_now"]}
    rows: list[str] = []
    for name, result in sorted(timed.items(), key=lambda each: (each[1]["kernel"], each[1]["seconds"])):
        ratio = now.get(result["kernel"], float("nan")) / result["seconds"]
        mark = " (as it is)" if result["is_now"] else ""
        rows.append(f"| {name}{mark} | {milliseconds(result['seconds'])} | {ratio:.2f} |")
    rows += [f"| {name} | {result['error']} | |" for name, result in results.items() if "error" in result]
    head = ["| launch | ms | times as fast as now |", "|---|---|---|"]
    return ["## Launches, a proposal", "", *([*head, *rows] if rows else ["Not measured."]), ""]


def oracle_section(folder: Path) -> list[str]:
    """Which ways of running gave the tokens of running alone."""
    runs = dict(read(folder / "oracle.json"))
    promise = runs.pop("batch_invariant", None)
    lines = [
        f"| {way} | {run['num_different']} of {run['num_sequences']} | {run['num_steps']} | {run['num_preemptions']} "
        f"| {run['num_kills']} |"
        for way, run in runs.items()
    ]
    head = ["| way | different from alone | steps | preemptions | kills |", "|---|---|---|---|---|"]
    said = "The backend promises the same bits." if promise else "The backend promises no equal bits."
    return ["## Any way of running", "", *([said, "", *head, *lines] if lines else ["Not run."]), ""]


def report(folder: Path) -> str:
    """The page."""
    ops, steps = read(folder / "ops.json"), read(folder / "steps.json")
    lines = [
        "# A day on a GPU",
        "",
        *machine_section(folder),
        *stages_section(folder),
        *tests_section(folder),
        *times_section("Ops of a layer of Llama-3.1-8B's shape", ops),
        *instructions_section(ops.get("instructions")),
        *times_section("Steps of Llama-3.1-8B's shape", steps),
        *products_section(steps.get("products", {})),
        *oracle_section(folder),
        *table_section(read(folder / "table.json")),
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the page, or keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder given to gpu_day.sh as OUT")
    parser.add_argument("--write", action="store_true", help="keep the page among the results")
    arguments = parser.parse_args()
    page = report(arguments.folder)
    if arguments.write:
        (RESULTS / f"gpu-{datetime.now(UTC).date().isoformat()}.md").write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
