// The models, and of one of them the live charts and the table of replicas: asks /status once a second while somebody looks.

import { Chart } from "./chart.js";
import { ApiError } from "./client.js";
import { byId, make } from "./elements.js";
import { compact, count, counted, duration, percent, UNKNOWN } from "./format.js";
import { ModelList } from "./models.js";
import { Readings, seconds } from "./readings.js";
import { History } from "./series.js";

const PERIOD_SECONDS = 1;
const SHOWN_SECONDS = 120;

const CHARTS = [
  {
    title: "Requests",
    hint: "Sequences that run and are swapped out, and requests that wait, on all replicas",
    format: count,
    series: [
      { name: "running", label: "running" },
      { name: "waiting", label: "waiting" },
      { name: "swapped", label: "swapped" },
    ],
  },
  {
    title: "Tokens a second",
    hint: "Tokens generated, and prompt tokens computed, those from the prefix cache left out",
    format: compact,
    series: [
      { name: "generated", label: "generated" },
      { name: "prefilled", label: "prefilled" },
    ],
  },
  {
    title: "Time to first token",
    hint: "Median and 95th percentile of this gateway's requests of ten seconds; the dots are this page's own",
    format: duration,
    series: [
      { name: "firstTokenMedian", label: "p50" },
      { name: "firstTokenHigh", label: "p95" },
      { name: "pageFirstToken", label: "page", kind: "dots" },
    ],
  },
  {
    title: "Between tokens",
    hint: "Median and 95th percentile of this gateway's answers of ten seconds; the dots are this page's own",
    format: duration,
    series: [
      { name: "interTokenMedian", label: "p50" },
      { name: "interTokenHigh", label: "p95" },
      { name: "pageInterToken", label: "page", kind: "dots" },
    ],
  },
  {
    title: "Device blocks",
    hint: "KV blocks on the device that sequences hold, and those that can be found by prefix",
    format: count,
    top: (values) => values.deviceTotal ?? 0,
    series: [
      { name: "deviceUsed", label: "in use", kind: "area" },
      { name: "deviceCached", label: "cached" },
    ],
  },
  {
    title: "Host blocks",
    hint: "KV blocks in the swap pool that sequences hold, and those that can be found by prefix",
    format: count,
    top: (values) => values.hostTotal ?? 0,
    series: [
      { name: "hostUsed", label: "in use", kind: "area" },
      { name: "hostCached", label: "cached" },
    ],
  },
];

/**
 * Shows how the system is. `seen()` gives the latencies that the page itself saw since it was asked last; `model` is the
 * model whose scheduler is shown, or empty for the gateway's first.
 */
export class Board {
  #gateway;
  #seen;
  #model;
  #models = new ModelList((name) => this.#gateway.load(name));
  #readings = new Readings();
  #history = new History(SHOWN_SECONDS);
  #charts = CHARTS.map((chart) => new Chart(chart));
  #timer = null;
  #isAsking = false;
  #wasReady = null;
  /** Called with no arguments when the gateway becomes ready, and awaited before the page says so. */
  onReady = () => {};
  /** Called with the model that is shown from now on. */
  onChoose = () => {};

  constructor(gateway, seen, model) {
    this.#gateway = gateway;
    this.#seen = seen;
    this.#model = model;
    this.#models.onChoose = (name) => this.#choose(name);
    byId("charts").append(...this.#charts.map((chart) => chart.element));
    document.addEventListener("visibilitychange", () => {
      // Lines end where nobody looked.
      if (this.#history.last) this.#add({});
      this.start();
    });
  }

  /** Asks now, and then again and again while the page can be seen. */
  start() {
    clearTimeout(this.#timer);
    if (!document.hidden && !this.#isAsking) this.#ask();
  }

  /** Shows another model, whose lines begin now. */
  #choose(model) {
    this.#model = model;
    this.#readings = new Readings();
    this.#history = new History(SHOWN_SECONDS);
    this.onChoose(model);
    this.start();
  }

  async #ask() {
    this.#isAsking = true;
    let goesOn = true;
    const model = this.#model;
    try {
      const status = await this.#gateway.status(model);
      if (model === this.#model) await this.#take(status);
    } catch (error) {
      goesOn = this.#fail(error);
    }
    this.#isAsking = false;
    const seconds = model === this.#model ? PERIOD_SECONDS : 0;
    if (goesOn && !document.hidden) this.#timer = setTimeout(() => this.#ask(), 1000 * seconds);
  }

  async #take(status) {
    const { gateway, scheduler, models = [] } = status;
    const model = models.find(({ name }) => name === this.#model) ?? models[0];
    this.#models.show(models, model?.name);
    this.#add({ ...this.#readings.take(status), ...this.#seen() });
    byId("version").textContent = gateway.version;
    byId("totals").textContent = scheduler ? totals(scheduler) : missing(model);
    byId("replicas").replaceChildren(...(scheduler?.replicas ?? []).flatMap((replica) => this.#rows(replica)));
    byId("recoveries").replaceChildren(...(scheduler?.recoveries ?? []).slice(0, 3).map(recovery));
    // First, since the form that people see depends on the model.
    if (gateway.ready && !this.#wasReady) await this.onReady();
    this.#wasReady = gateway.ready;
    showReadiness(gateway.ready, gateway.ready ? "ready" : gateway.message || "not ready");
  }

  /** Tells what is wrong; returns whether asking again may help. */
  #fail(error) {
    this.#wasReady = false;
    this.#add({});
    const needsKey = error instanceof ApiError && (error.status === 401 || error.status === 403);
    // The gateway may have been started with other models.
    if (this.#model && error.status === 404) this.#choose("");
    showReadiness(false, needsKey ? "needs an API key" : error.message);
    return !needsKey;
  }

  #add(values) {
    this.#history.add(performance.now() / 1000, values);
    for (const chart of this.#charts) chart.show(this.#history);
  }

  /** Makes two rows: numbers, and where they are from, which may be long. */
  #rows(replica) {
    const workers = replica.workers ?? [];
    const all = (name) => [...new Set(workers.map((worker) => worker[name]))].filter(Boolean).join(" + ");
    const cells = [
      make("th", { scope: "row" }, String(replica.replica_id)),
      make("td", {}, state(replica, workers[0] ?? {})),
      ...[
        count(replica.num_running_sequences),
        compact(this.#readings.stepRate(replica.replica_id)),
        blocks(replica.device_blocks),
      ].map((text) => make("td", { className: "number" }, text)),
    ];
    const place = [all("address"), all("device"), `epoch ${count(Number(replica.epoch))}`].filter(Boolean).join(" · ");
    return [
      make("tr", {}, ...cells),
      make("tr", { className: "place faint" }, make("td", { colSpan: cells.length }, place)),
    ];
  }
}

function showReadiness(ready, text) {
  const chip = byId("readiness");
  chip.dataset.state = ready ? "good" : "bad";
  // Read aloud when it changes, not each second.
  if (chip.textContent !== text) chip.textContent = text;
}

function state(replica, worker) {
  const drained = { DRAIN_STATE_DRAINING: "draining", DRAIN_STATE_DRAINED: "drained" }[replica.drain_state];
  const state = (worker.state ?? "").replace("WORKER_STATE_", "").replaceAll("_", " ").toLowerCase();
  const text = drained ?? (replica.ready ? "ready" : state || "not ready");
  const chip = make("span", { className: "chip", title: worker.message ?? "" }, text);
  chip.dataset.state = drained ? "middling" : replica.ready ? "good" : "bad";
  return chip;
}

function missing(model) {
  return model?.starts_on_demand ? "The model is not loaded." : "The scheduler does not answer.";
}

function blocks(pool) {
  return pool?.num_blocks ? `${count(pool.num_blocks - pool.num_free_blocks)} / ${count(pool.num_blocks)}` : UNKNOWN;
}

function totals(scheduler) {
  const prompt = Number(scheduler.num_prompt_tokens);
  const counts = [
    `${compact(Number(scheduler.num_completion_tokens))} tokens generated`,
    `${compact(prompt)} prompt tokens`,
    prompt ? `${percent(Number(scheduler.num_cached_tokens) / prompt)} of them cached` : null,
    counted(Number(scheduler.num_preemptions), "preemption"),
    counted(Number(scheduler.num_recoveries), "recovery", "recoveries"),
  ];
  return `Since the scheduler's start: ${counts.filter(Boolean).join(", ")}.`;
}

function recovery({ replica_id: id, age, cause, num_requests: num }) {
  return make("li", {}, `${duration(seconds(age))} ago, replica ${id}: ${cause} (${counted(num, "request")} went on)`);
}
