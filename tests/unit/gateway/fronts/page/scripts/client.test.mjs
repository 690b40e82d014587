import assert from "node:assert/strict";
import test from "node:test";

import { ApiError, Gateway, newRequestId, streamAnswer, Unreachable } from "../../../../../../gateway/fronts/page/static/client.js";

const CHUNK = (number) => ({ choices: [{ index: 0, text: String(number) }] });
const event = (number) => `id: 0:${number}:${number}\ndata: ${JSON.stringify(CHUNK(number))}\n\n`;
const DONE = "data: [DONE]\n\n";
const failure = (code) => `data: ${JSON.stringify({ error: { message: "it broke", code, violations: null } })}\n\n`;

function answer(...pieces) {
  return () => new Response(pieces.join(""));
}

/** A response that is cut behind some events. */
function cut(...pieces) {
  return () => {
    let isTold = false;
    const pull = (controller) => {
      if (isTold) controller.error(new TypeError("network error"));
      else controller.enqueue(new TextEncoder().encode(pieces.join("")));
      isTold = true;
    };
    return new Response(new ReadableStream({ pull }));
  };
}

function refusal(status, error, headers = {}) {
  return () => new Response(JSON.stringify({ error }), { status, headers });
}

function nothing() {
  throw new TypeError("Failed to fetch");
}

/** Plays answers one after the other; returns what was asked for. */
function play(...answers) {
  const calls = [];
  globalThis.fetch = async (path, options) => {
    calls.push({ path, ...options });
    return answers.shift()();
  };
  return calls;
}

test("a model's status is asked for by its name, and its load in a body", async () => {
  const calls = play(answer("{}"), answer("{}"), answer("{}"));
  const gateway = new Gateway();
  await gateway.status();
  await gateway.status("org/large");
  await gateway.load("org/large");
  assert.deepEqual(
    calls.map(({ path, method, body }) => [path, method, body]),
    [
      ["status", undefined, undefined],
      ["status?model=org%2Flarge", undefined, undefined],
      ["v1/models/load", "POST", '{"model":"org/large"}'],
    ],
  );
});

async function read(signal) {
  const told = [];
  const pauses = [];
  const pause = async (seconds) => pauses.push(seconds);
  let error = null;
  try {
    for await (const each of streamAnswer(new Gateway(), "v1/completions", { prompt: "x" }, "page-1", signal, pause)) {
      told.push(each.chunk ? each.chunk.choices[0].text : Object.keys(each)[0]);
    }
  } catch (caught) {
    error = caught;
  }
  return { told, pauses, error };
}

test("an answer is read to its end", async () => {
  const calls = play(answer(event(1), event(2), DONE));
  assert.deepEqual((await read()).told, ["1", "2"]);
  assert.equal(calls[0].headers["Idempotency-Key"], "page-1");
  assert.deepEqual(JSON.parse(calls[0].body), { prompt: "x" });
});

for (const [name, end] of Object.entries({
  "a connection that breaks": cut(event(1), event(2)),
  "a stream that just ends": answer(event(1), event(2)),
  "a gateway that stops": answer(event(1), event(2), failure("DRAINING")),
})) {
  test(`${name} is read on behind what has come`, async () => {
    const calls = play(end, nothing, refusal(503, { message: "not yet", code: "DRAINING" }), answer(event(3), DONE));
    const { told, pauses, error } = await read();
    assert.equal(error, null);
    assert.deepEqual(told, ["1", "2", "broken", "resumed", "3"]);
    assert.equal(calls.at(-1).path, "v1/requests/page-1/stream");
    assert.equal(calls.at(-1).headers["Last-Event-ID"], "0:2:2");
    assert.deepEqual(pauses, [0.25, 0.5, 1]);
  });
}

test("before the first token there is nothing behind which to go on", async () => {
  const calls = play(cut('data: {"choices": [{"index": 0, "text": ""}]}\n\n'), answer(event(1), DONE));
  assert.deepEqual((await read()).told, ["", "broken", "resumed", "1"]);
  assert.equal("Last-Event-ID" in calls[1].headers, false);
});

test("a second break is read on from where the first one ended", async () => {
  const calls = play(cut(event(1)), cut(), answer(event(2), DONE));
  assert.deepEqual((await read()).told, ["1", "broken", "resumed", "broken", "resumed", "2"]);
  assert.equal(calls[2].headers["Last-Event-ID"], "0:1:1");
});

test("a gateway that stays away is given up", async () => {
  play(cut(event(1)), ...Array.from({ length: 40 }, () => nothing));
  const { error, pauses } = await read();
  assert.ok(error instanceof Unreachable);
  const waited = pauses.reduce((sum, seconds) => sum + seconds, 0);
  assert.ok(waited >= 30 && waited <= 35, String(waited));
});

test("an answer that nobody remembers is an error", async () => {
  play(cut(event(1)), refusal(404, { message: "gone", code: "REQUEST_EXPIRED" }));
  const { error } = await read();
  assert.deepEqual([error.code, error.status], ["REQUEST_EXPIRED", 404]);
});

test("a failure within the stream is told and not read on", async () => {
  const calls = play(answer(event(1), failure("POISON_REQUEST")));
  const { told, error } = await read();
  assert.deepEqual([told, error.code, error.message, error.violations], [["1"], "POISON_REQUEST", "it broke", []]);
  assert.equal(calls.length, 1);
});

test("what is no JSON is an error, and not asked for again and again", async () => {
  play(answer("data: {oh\n\n"));
  assert.ok((await read()).error instanceof SyntaxError);
});

test("a refusal has its reason, its violations, and when to try again", async () => {
  const violations = [{ param: "top_p", message: "must be above 0", code: "FIELD_INVALID" }];
  play(refusal(429, { message: "no", code: "QUEUE_FULL", violations }, { "retry-after": "3" }));
  const { error } = await read();
  assert.ok(error instanceof ApiError);
  assert.deepEqual([error.status, error.code, error.retryAfterSeconds], [429, "QUEUE_FULL", 3]);
  assert.deepEqual(error.violations, violations);
});

test("an answer of somebody else is told by its status", async () => {
  play(() => new Response("<h1>Bad Gateway</h1>", { status: 502, statusText: "Bad Gateway" }));
  const { error } = await read();
  assert.deepEqual([error.code, error.message], ["HTTP 502", "Bad Gateway"]);
});

test("no answer at all is Unreachable", async () => {
  play(nothing);
  assert.ok((await read()).error instanceof Unreachable);
});

test("stopping is no failure of the gateway", async () => {
  const abort = new AbortController();
  globalThis.fetch = async (_, { signal }) => {
    abort.abort();
    throw signal.reason;
  };
  assert.equal((await read(abort.signal)).error.name, "AbortError");
});

test("stopping ends the wait for a gateway that is away", async () => {
  const abort = new AbortController();
  play(cut(event(1)));
  const events = streamAnswer(new Gateway(), "v1/completions", {}, "page-1", abort.signal);
  await events.next();
  assert.deepEqual((await events.next()).value, { broken: true });
  const rest = events.next();
  abort.abort();
  await assert.rejects(rest, { name: "AbortError" });
});

test("the key goes with every call, and none without one", async () => {
  const gateway = new Gateway();
  const calls = play(answer("{}"), answer('{"data": []}'), answer("{}"));
  await gateway.status();
  gateway.key = "secret";
  await gateway.models();
  await gateway.cancel("page-1");
  assert.deepEqual(
    calls.map(({ headers }) => headers.Authorization),
    [undefined, "Bearer secret", "Bearer secret"],
  );
  assert.deepEqual([calls[2].path, calls[2].method, calls[2].keepalive], ["v1/requests/page-1", "DELETE", true]);
});

test("request ids are new each time, and such as the gateway takes", () => {
  const ids = new Set(Array.from({ length: 100 }, newRequestId));
  assert.equal(ids.size, 100);
  for (const id of ids) assert.match(id, /^page-[0-9a-f]{24}$/);
});
