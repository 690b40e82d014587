"""Draws throughput against the number of requests as SVG, from what benchmarks/peers.py and throughput.py have kept.

    python benchmarks/plot.py [MODEL ...] [--kind int8]

Of a model's last run beside peers, else of its last run by itself: the ideal, ours and theirs; medians as lines,
extremes as bars. A picture for each instruction set: benchmarks/results/throughput-MODEL-INSTRUCTION_SET.svg.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.kit.figures import Spread

RESULTS = Path(__file__).parent / "results"
COMMANDS = ("peers", "throughput")
WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 170, 48, 52
LABEL_HEIGHT = 16
NUM_GRID_LINES = 6
# Colours that people who confuse red and green can distinguish; the first is ours, the ideal is drawn in grey.
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
NAMES: dict[str, str] = {"generate": "ours", "stream": "ours, streamed", "alone": "our worker alone"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.g{stroke:#ddd}.i{stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.g{stroke:#444}}"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One contestant: tokens a second by the number of requests."""

    name: str
    points: dict[int, Spread]


def curves_of(results: dict[str, Any]) -> list[Curve]:
    """The curves of one kept run."""
    points: dict[str, dict[int, Spread]] = {}
    for requests, measured in results["requests"].items():
        for name, spread in measured["tokens_per_second"].items():
            points.setdefault(str(NAMES.get(name, name)), {})[int(requests)] = spread
    return [Curve(name, by_requests) for name, by_requests in points.items()]


def last_runs(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The results of the last kept run of a way of computing, by instruction set; "": of runs that do not name it."""
    runs = json.loads(path.read_text()) if path.exists() else []
    return {
        run["machine"].get("instruction_set", ""): run["results"]
        for run in runs
        if kind == (run["results"]["settings"]["quantization"] or run["results"]["settings"]["dtype"])
    }


# The drawing.


class Axes:
    """Where numbers lie: requests by their logarithm from left to right, tokens a second from the bottom."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.requests = sorted({number for curve in curves for number in curve.points})
        highest = max(spread["max"] for curve in curves for spread in curve.points.values())
        self.step = nice_step(highest / NUM_GRID_LINES)
        self.top = self.step * math.ceil(highest / self.step)

    def x(self, requests: int) -> float:
        """The horizontal place of a number of requests."""
        first, last = (math.log2(self.requests[end]) for end in (0, -1))
        share = (math.log2(requests) - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, rate: float) -> float:
        """The vertical place of a rate."""
        return HEIGHT - BOTTOM - rate / self.top * (HEIGHT - TOP - BOTTOM)


def nice_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20 and so on, at or above `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def draw(title: str, curves: Sequence[Curve]) -> str:
    """Draws curves as a whole SVG file."""
    axes = Axes(curves)
    ordered = sorted(curves, key=lambda curve: curve.name != "ideal")
    palette = iter(COLORS * (1 + len(curves) // len(COLORS)))
    colors = {curve.name: "#888" if curve.name == "ideal" else next(palette) for curve in ordered}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        _text(LEFT, 24, title, "start", "t"),
        *_grid(axes),
        *(part for curve in ordered for part in _curve(axes, curve, colors[curve.name])),
        *_labels(axes, ordered, colors),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _grid(axes: Axes) -> Iterable[str]:
    for number in range(round(axes.top / axes.step) + 1):
        y = axes.y(number * axes.step)
        yield f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 8, y + 4, f"{number * axes.step:,g}", "end")
    for requests in axes.requests:
        yield _text(axes.x(requests), HEIGHT - BOTTOM + 20, str(requests), "middle")
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, HEIGHT - 10, "requests at once; tokens a second, all together", "middle")


def _curve(axes: Axes, curve: Curve, color: str) -> Iterable[str]:
    places = [(axes.x(n), axes.y(spread["median"]), spread) for n, spread in sorted(curve.points.items())]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dashes = ' stroke-dasharray="5 4"' if curve.name == "ideal" else ""
    yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
    for x, y, spread in places:
        low, high = axes.y(spread["min"]), axes.y(spread["max"])
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'


def _labels(axes: Axes, curves: Sequence[Curve], colors: dict[str, str]) -> Iterable[str]:
    """Each curve's name beside its end, moved down where two would lie upon each other."""
    ends = {curve.name: axes.y(curve.points[max(curve.points)]["median"]) for curve in curves}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda item: item[1]):
        last = max(y, last + LABEL_HEIGHT)
        x = WIDTH - RIGHT + 12
        yield f'<circle cx="{x}" cy="{last:.1f}" r="4" fill="{colors[name]}"/>'
        yield _text(x + 9, last + 4, name, "start")


def plot(model: str, kind: str) -> list[Path]:
    """Draws a model's last run of each instruction set, and returns the files."""
    runs: dict[str, dict[str, Any]] = {}
    for command in reversed(COMMANDS):
        runs |= last_runs(RESULTS / f"{command}-{model}.json", kind)
    targets: list[Path] = []
    for instruction_set, results in runs.items():
        name = filter(None, ("throughput", model, "" if kind == "bfloat16" else kind, instruction_set))
        targets.append(RESULTS / f"{'-'.join(name)}.svg")
        workload = results["workload"]
        lengths = f"{workload['prompt_tokens']} prompt and {workload['output_tokens']} output tokens"
        title = ", ".join(filter(None, (model, kind, instruction_set, lengths)))
        targets[-1].write_text(draw(title, curves_of(results)))
    return targets


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all that have results")
    parser.add_argument("--kind", choices=("bfloat16", "float32", "int8"), default="bfloat16")
    options = parser.parse_args()
    kept = {path.stem.partition("-")[2] for command in COMMANDS for path in RESULTS.glob(f"{command}-*.json")}
    for model in options.models or sorted(kept):
        targets = plot(model, options.kind)
        if not targets and options.models:
            parser.error(f"nothing of {model} in {options.kind} is kept in {RESULTS}")
        print(*targets or [f"nothing of {model} in {options.kind}"], sep="\n")


if __name__ == "__main__":
    main()
