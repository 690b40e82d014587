import assert from "node:assert/strict";
import test from "node:test";

import { compact, count, counted, duration, percent } from "../../../../../../gateway/fronts/page/static/format.js";
import { Meter, Timing } from "../../../../../../gateway/fronts/page/static/meter.js";
import { ceiling, difference, History, quantile, ratio } from "../../../../../../gateway/fronts/page/static/series.js";

test("a history keeps its time and one sample before", () => {
  const history = new History(10);
  for (let at = 0; at <= 30; at++) history.add(at, { at });
  assert.deepEqual([history.samples[0].at, history.last.at], [19, 30]);
});

test("a history without gaps or with them is bounded", () => {
  const history = new History(10);
  history.add(0, {});
  history.add(1000, {});
  assert.deepEqual(
    history.samples.map(({ at }) => at),
    [0, 1000],
  );
  history.add(1001, {});
  assert.deepEqual(
    history.samples.map(({ at }) => at),
    [0, 1000, 1001],
  );
  for (let at = 1002; at < 3000; at++) history.add(at, {});
  assert.ok(history.samples.length <= 12);
});

test("a ratio is of what grew", () => {
  const [above, below] = [(of) => of.tokens, (of) => of.time];
  const reading = (tokens, time) => ({ tokens, time });
  assert.equal(ratio(reading(10, 1), reading(40, 3), above, below), 15);
  assert.equal(ratio(reading(10, 1), reading(10, 3), above, below), 0);
  assert.equal(ratio(undefined, reading(10, 1), above, below), null);
  assert.equal(ratio(reading(10, 1), reading(10, 1), above, below), null, "the same reading twice");
  assert.equal(ratio(reading(10, 9), reading(2, 1), above, below), null, "after a restart");
});

test("a histogram between two readings has what came in between", () => {
  const reading = (...counts) => ({ ends: [1, 2], counts });
  assert.deepEqual(difference(reading(1, 2, 3), reading(1, 5, 3)), reading(0, 3, 0));
  assert.equal(difference(undefined, reading(1, 2, 3)), null);
  assert.equal(difference(reading(1, 2, 3), reading(0, 2, 3)), null, "after a restart");
  assert.equal(difference({ ends: [1], counts: [1, 1] }, reading(1, 2, 3)), null, "of another version");
});

test("a quantile is where so many are below it", () => {
  const histogram = { ends: [1, 2, 4], counts: [10, 10, 20, 0] };
  const shares = [0.25, 0.5, 0.75, 1, 0.125];
  assert.deepEqual(
    shares.map((share) => quantile(histogram, share)),
    [1, 2, 3, 4, 0.5],
  );
  assert.equal(quantile({ ends: [1, 2], counts: [0, 0, 5] }, 0.5), 2, "all that is known of it");
  assert.equal(quantile({ ends: [1, 2], counts: [0, 4, 0] }, 0.5), 1.5);
  assert.equal(quantile({ ends: [1, 2], counts: [0, 0, 0] }, 0.5), null);
  assert.equal(quantile(null, 0.5), null);
});

test("the upper edge is a round number", () => {
  assert.deepEqual(
    [0, -1, NaN, 1, 1.1, 3, 6, 10, 11, 0.03, 480].map(ceiling),
    [1, 1, 1, 1, 2, 5, 10, 10, 20, 0.05, 500],
  );
});

test("numbers read well", () => {
  assert.deepEqual([null, undefined, 0, 1234567].map(count), ["–", "–", "0", "1,234,567"]);
  assert.deepEqual([counted(1, "token"), counted(0, "token")], ["1 token", "0 tokens"]);
  assert.equal(counted(2, "recovery", "recoveries"), "2 recoveries");
  assert.deepEqual([null, 0, 12.34, 1234567].map(compact), ["–", "0", "12.3", "1.23M"]);
  const durations = [null, 0.00123, 0.0456, 0.9999, 1.234, 12.34, 61, 3599];
  assert.deepEqual(durations.map(duration), [
    "–",
    "1.2 ms",
    "46 ms",
    "1.00 s",
    "1.23 s",
    "12.3 s",
    "1 min 1 s",
    "59 min 59 s",
  ]);
  assert.deepEqual([null, 0, 0.0001, 0.123, 0.9999, 1].map(percent), [
    "–",
    "0.0 %",
    "<0.1 %",
    "12.3 %",
    ">99.9 %",
    "100.0 %",
  ]);
});

test("an answer is timed by its tokens, each choice by itself", () => {
  const timing = new Timing(100);
  assert.equal(timing.note(0, 0, 100.1), null, "no token yet");
  assert.equal(timing.firstToken, null);
  assert.equal(timing.note(0, 1, 100.5), null);
  assert.equal(timing.firstToken, 0.5);
  assert.equal(timing.note(0, 2, 101.5), 0.5);
  assert.equal(timing.note(1, 1, 101.5), null);
  assert.equal(timing.numTokens, 4);
  assert.equal(timing.rate(102), 2);
  assert.equal(new Timing(0).rate(1), null);
});

test("a meter tells means, once", () => {
  const meter = new Meter();
  meter.addFirst(1);
  meter.addFirst(3);
  assert.deepEqual(meter.take(), { pageFirstToken: 2, pageInterToken: null });
  meter.addNext(0.5);
  assert.deepEqual(meter.take(), { pageFirstToken: null, pageInterToken: 0.5 });
});
