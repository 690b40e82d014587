// One chart: lines, and areas on top of one another, over the last minutes, with what they say in figures above them.

import { draw, make } from "./elements.js";
import { ceiling } from "./series.js";

// The drawing's own units. It is stretched to the room that there is; lines keep their width.
const WIDTH = 240;
const HEIGHT = 100;
const GRID = `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`;

/** A figure on the page: its `element`. */
export class Chart {
  #title;
  #series;
  #format;
  #top;
  #parts;
  #history = null;
  // Where the pointer is, as a share of the width; null: nowhere.
  #pointed = null;

  /**
   * `series` is a list of {name, label, kind}: kind "line" (the default), "dots", or "area", which stands on the areas
   * before it. `format` makes a value a text. `top` gives the value at the upper edge; without it this follows the values.
   */
  constructor({ title, hint, series, format, top = null }) {
    this.#title = title;
    this.#series = series;
    this.#format = format;
    this.#top = top;
    this.#parts = makeParts(series);
    const { legend, plot, axis } = this.#parts;
    this.element = make(
      "figure",
      { className: "chart", title: hint },
      make("figcaption", {}, title),
      legend,
      plot,
      axis,
    );
    plot.addEventListener("pointermove", (event) => this.#point(event));
    plot.addEventListener("pointerleave", () => this.#point(null));
  }

  /** Draws a history. */
  show(history) {
    this.#history = history;
    const { samples, last, seconds } = history;
    const columns = stacked(this.#series, samples);
    const top = this.#top ? this.#top(last.values) : ceiling(Math.max(...columns.flat()));
    const point = (row, value) =>
      value === null
        ? null
        : [place(samples[row].at, last.at, seconds), HEIGHT * (1 - Math.min(1, value / (top || 1)))];
    this.#series.forEach(({ kind = "line" }, index) => {
      const points = columns[index].map((value, row) => point(row, value));
      this.#parts.marks[index].setAttribute("d", PATHS[kind](points));
    });
    this.#parts.upper.textContent = this.#format(top);
    this.#read();
  }

  #point(event) {
    const box = this.#parts.svg.getBoundingClientRect();
    this.#pointed = event ? (event.clientX - box.left) / box.width : null;
    if (this.#history) this.#read();
  }

  /** Tells the values where the pointer is, or else the last ones. */
  #read() {
    const { samples, last, seconds } = this.#history;
    const isNow = this.#pointed === null;
    const sample = isNow ? last : nearest(samples, last.at - seconds * (1 - this.#pointed));
    const texts = this.#series.map(({ name, kind }) => {
      // Dots are seldom: the last one stands for now.
      const shown = isNow && kind === "dots" ? samples.findLast(({ values }) => values[name] != null) : sample;
      return this.#format(shown?.values[name]);
    });
    const { svg, readings, when, cursor } = this.#parts;
    texts.forEach((text, index) => (readings[index].textContent = text));
    when.textContent = isNow ? "now" : `${Math.round(last.at - sample.at)} s ago`;
    cursor.setAttribute("d", isNow ? "" : `M${place(sample.at, last.at, seconds).toFixed(1)} 0V${HEIGHT}`);
    const description = this.#series.map(({ label }, index) => `${label} ${texts[index]}`).join(", ");
    svg.setAttribute("aria-label", `${this.#title}: ${description}`);
  }
}

function makeParts(series) {
  const colours = series.map((_, index) => `series-${index + 1}`);
  const marks = series.map(({ kind = "line" }, index) => draw("path", { class: `mark ${kind} ${colours[index]}` }));
  const readings = series.map(() => make("dd"));
  const entries = series.map(({ label }, index) =>
    make("div", {}, make("dt", { className: colours[index] }, label), readings[index]),
  );
  const cursor = draw("path", { class: "cursor" });
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
  const svg = draw("svg", box, draw("path", { class: "grid", d: GRID }), ...marks, cursor);
  const upper = make("span", { className: "upper" });
  const when = make("span", {}, "now");
  return {
    marks,
    readings,
    cursor,
    svg,
    upper,
    when,
    legend: make("dl", { className: "legend" }, ...entries),
    plot: make("div", { className: "plot" }, svg, upper),
    axis: make("div", { className: "axis" }, make("span", {}, "2 min ago"), when),
  };
}

/** Gives a column of values for each series, a row for each sample. */
function stacked(series, samples) {
  const floor = samples.map(() => 0);
  return series.map(({ name, kind }) =>
    samples.map(({ values }, row) => {
      const value = values[name] ?? null;
      if (kind !== "area" || value === null) return value;
      return (floor[row] += value);
    }),
  );
}

/** Gives where a time is, from left to right. */
function place(at, last, seconds) {
  return WIDTH * (1 - (last - at) / seconds);
}

function nearest(samples, at) {
  return samples.reduce((best, sample) => (Math.abs(sample.at - at) < Math.abs(best.at - at) ? sample : best));
}

/** Splits points where one is not known. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point) found.at(-1).push(point);
    else found.push([]);
  }
  return found.filter((run) => run.length);
}

function through(points) {
  return points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
}

// A line without a length is drawn as a dot.
const PATHS = {
  line: (points) =>
    runs(points)
      .map((run) => `M${through(run)}${run.length === 1 ? "h0" : ""}`)
      .join(""),
  area: (points) =>
    runs(points)
      .map((run) => `M${run[0][0].toFixed(1)} ${HEIGHT}L${through(run)}V${HEIGHT}Z`)
      .join(""),
  dots: (points) =>
    runs(points)
      .flat()
      .map((point) => `M${through([point])}h0`)
      .join(""),
};
