// Makes numbers to show of what /status tells: sums over replicas, and rates of totals between two readings.
// 64-bit numbers come as strings, durations as "1.5s", as protobuf writes them in JSON.

import { difference, quantile, ratio } from "./series.js";

// Requests may be seldom: their latencies are those of this time.
const LATENCY_READINGS = 10;

const HIGH = 0.95;

/** Gives a duration in seconds, or null. */
export function seconds(duration) {
  return duration ? Number.parseFloat(duration) : null;
}

const total = (name) => (of) => Number(of[name] ?? 0);
const uptime = (scheduler) => seconds(scheduler.uptime) ?? 0;
const computedPromptTokens = (scheduler) =>
  total("num_prompt_tokens")(scheduler) - total("num_cached_tokens")(scheduler);
const histogram = (latency) => latency && { ends: latency.bucket_ends, counts: latency.bucket_counts.map(Number) };

/** Takes one answer of /status after the other. */
export class Readings {
  #taken = [];

  /** Takes the next; returns the values that charts show. What it lacks is null. */
  take(status) {
    this.#taken.push(status);
    if (this.#taken.length > LATENCY_READINGS + 1) this.#taken.shift();
    const before = this.#taken.at(-2);
    const { scheduler } = status;
    return {
      ...(scheduler ? ofScheduler(scheduler, before?.scheduler) : {}),
      ...ofGateway(status.gateway, this.#taken[0].gateway),
    };
  }

  /** Gives how many steps a second a replica has made between the last two. */
  stepRate(replicaId) {
    const [before, now] = this.#taken.slice(-2).map(({ scheduler }) => ({
      scheduler: scheduler ?? {},
      replica: (scheduler?.replicas ?? []).find((replica) => replica.replica_id === replicaId),
    }));
    if (!before?.replica || !now?.replica) return null;
    const steps = ({ replica }) => total("num_steps")(replica);
    return ratio(before, now, steps, (of) => uptime(of.scheduler));
  }
}

function ofScheduler(scheduler, before) {
  const replicas = scheduler.replicas ?? [];
  const sum = (of) => replicas.reduce((all, replica) => all + Number(of(replica) ?? 0), 0);
  return {
    running: sum((replica) => replica.num_running_sequences),
    swapped: sum((replica) => replica.num_swapped_sequences),
    waiting: scheduler.num_waiting_requests,
    generated: ratio(before, scheduler, total("num_completion_tokens"), uptime),
    prefilled: ratio(before, scheduler, computedPromptTokens, uptime),
    ...ofPool("device", sum),
    ...ofPool("host", sum),
  };
}

function ofPool(name, sum) {
  const all = sum((replica) => replica[`${name}_blocks`]?.num_blocks);
  return {
    [`${name}Total`]: all,
    [`${name}Used`]: all - sum((replica) => replica[`${name}_blocks`]?.num_free_blocks),
    [`${name}Cached`]: sum((replica) => replica[`${name}_blocks`]?.num_cached_blocks),
  };
}

function ofGateway(gateway, before) {
  const ofTime = (name) => difference(histogram(before[name]), histogram(gateway[name]));
  const [firstTokens, interTokens] = [ofTime("time_to_first_token"), ofTime("inter_token_latency")];
  return {
    firstTokenMedian: quantile(firstTokens, 0.5),
    firstTokenHigh: quantile(firstTokens, HIGH),
    interTokenMedian: quantile(interTokens, 0.5),
    interTokenHigh: quantile(interTokens, HIGH),
  };
}
