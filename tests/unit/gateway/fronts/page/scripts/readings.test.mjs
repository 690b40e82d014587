import assert from "node:assert/strict";
import test from "node:test";

import { Readings, seconds } from "../../../../../../gateway/fronts/page/static/readings.js";

function status(at, { completion = 0, prompt = 0, cached = 0, steps = 0, first = 0 } = {}) {
  const replica = (id) => ({
    replica_id: id,
    num_running_sequences: 2,
    num_swapped_sequences: 1,
    num_steps: String(steps),
    device_blocks: { num_blocks: 100, num_free_blocks: 60, num_cached_blocks: 30 },
    host_blocks: { num_blocks: 10, num_free_blocks: 10, num_cached_blocks: 0 },
  });
  return {
    gateway: { time_to_first_token: { bucket_ends: [1, 2], bucket_counts: ["0", String(first), "0"] } },
    scheduler: {
      uptime: `${at}s`,
      num_waiting_requests: 7,
      num_completion_tokens: String(completion),
      num_prompt_tokens: String(prompt),
      num_cached_tokens: String(cached),
      replicas: [replica(0), replica(1)],
    },
  };
}

test("durations are read", () => {
  assert.deepEqual(["1.500s", "0s", undefined].map(seconds), [1.5, 0, null]);
});

test("replicas are summed", () => {
  const told = new Readings().take(status(1));
  assert.deepEqual([told.running, told.swapped, told.waiting], [4, 2, 7]);
  assert.deepEqual([told.deviceUsed, told.deviceCached, told.deviceTotal], [80, 60, 200]);
  assert.deepEqual([told.hostUsed, told.hostCached, told.hostTotal], [0, 0, 20]);
});

test("rates are of two readings and the time between them there", () => {
  const readings = new Readings();
  assert.equal(readings.take(status(10)).generated, null);
  const told = readings.take(status(12, { completion: 50, prompt: 40, cached: 10, steps: 8 }));
  assert.deepEqual([told.generated, told.prefilled], [25, 15]);
  assert.equal(readings.stepRate(1), 4);
  assert.equal(readings.stepRate(2), null);
});

test("a restart is no negative rate", () => {
  const readings = new Readings();
  readings.take(status(100, { completion: 1000, steps: 9 }));
  assert.equal(readings.take(status(1, { completion: 5 })).generated, null);
  assert.equal(readings.stepRate(0), null);
  assert.equal(readings.take(status(2, { completion: 15 })).generated, 10);
});

test("latencies are those of ten readings", () => {
  const readings = new Readings();
  assert.equal(readings.take(status(0)).firstTokenMedian, null);
  for (let at = 1; at < 11; at++) assert.equal(readings.take(status(at, { first: 4 })).firstTokenMedian, 1.5);
  assert.equal(readings.take(status(11, { first: 4 })).firstTokenMedian, null, "nothing for ten readings");
  const told = readings.take(status(12, { first: 24 }));
  assert.deepEqual([told.firstTokenMedian, told.firstTokenHigh, told.interTokenMedian], [1.5, 1.95, null]);
});

test("without a scheduler only the gateway tells", () => {
  const readings = new Readings();
  readings.take({ gateway: {} });
  const told = readings.take({ gateway: status(1).gateway });
  assert.deepEqual(new Set(Object.values(told)), new Set([null]));
  assert.equal(readings.stepRate(0), null);
});
