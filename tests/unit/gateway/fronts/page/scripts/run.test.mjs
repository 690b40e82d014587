import assert from "node:assert/strict";
import test from "node:test";

import { Choice } from "../../../../../../gateway/fronts/page/static/answer.js";
import { ApiError, Gateway } from "../../../../../../gateway/fronts/page/static/client.js";
import { Meter } from "../../../../../../gateway/fronts/page/static/meter.js";
import { Run } from "../../../../../../gateway/fronts/page/static/run.js";

const USAGE = { prompt_tokens: 7, completion_tokens: 3, prompt_tokens_details: { cached_tokens: 4 } };

function chunk(index, text, tokenIds, ending = {}) {
  const choice = { index, text, token_ids: tokenIds, logprobs: null, finish_reason: null, ...ending };
  return `id: ${index}\ndata: ${JSON.stringify({ choices: [choice], usage: null })}\n\n`;
}

const END = [
  chunk(0, "", [], { finish_reason: "length" }),
  chunk(1, "", [], { finish_reason: "stop" }),
  `data: ${JSON.stringify({ choices: [], usage: USAGE })}\n\n`,
  "data: [DONE]\n\n",
].join("");

/** Runs a request whose connections are answered by these, one after the other. */
function begin(...answers) {
  const calls = [];
  globalThis.fetch = async (path, options) => {
    calls.push({ path, ...options });
    return answers.shift()(options);
  };
  const choices = [new Choice(), new Choice()];
  const meter = new Meter();
  const seen = [];
  const run = new Run(new Gateway(), choices, meter, () => seen.push(run.notice));
  return { run, choices, meter, calls, seen };
}

test("an answer fills its choices, and is summed up", async () => {
  const whole = [chunk(0, "a", [1]), chunk(1, "b", [2]), chunk(0, "c", [3]), END].join("");
  const { run, choices, meter, seen } = begin(() => new Response(whole));
  await run.read("v1/completions", {});
  assert.deepEqual([run.error, run.isRunning, run.notice], [null, false, ""]);
  assert.deepEqual(
    choices.map((choice) => choice.text),
    ["ac", "b"],
  );
  assert.equal(seen.length, 6);
  const [first, tokens, rate, prompt, ends] = run.facts;
  assert.match(first, /^first token [\d.]+ ms$/);
  assert.match(rate, /^[\d.]+ tokens\/s$/);
  assert.deepEqual(
    [tokens, prompt, ends],
    ["3 tokens", "7 prompt tokens, 4 of them cached", "max tokens reached, the model ended it"],
  );
  const told = meter.take();
  assert.ok(told.pageFirstToken > 0 && told.pageInterToken >= 0);
});

test("a connection that breaks is told while it lasts, and counted at the end", async () => {
  const { run, seen } = begin(
    () => new Response(chunk(0, "a", [1])),
    () => new Response(chunk(1, "b", [2]) + END),
  );
  await run.read("v1/completions", {});
  assert.match(seen[1], /reading on/);
  assert.equal(run.notice, "");
  assert.ok(run.facts.includes("1 reconnect"));
});

test("a refusal leaves nothing to sum up", async () => {
  const { run } = begin(() => new Response(JSON.stringify({ error: { message: "no", code: "X" } }), { status: 400 }));
  await run.read("v1/completions", {});
  assert.ok(run.error instanceof ApiError);
  assert.deepEqual([run.notice, run.facts], ["", []]);
});

test("a failure behind the first token says that the answer is not whole", async () => {
  const failure = `data: ${JSON.stringify({ error: { message: "no", code: "BUG", violations: null } })}\n\n`;
  const { run } = begin(() => new Response(chunk(0, "a", [1]) + failure));
  await run.read("v1/completions", {});
  assert.equal(run.error.code, "BUG");
  assert.match(run.notice, /ends here/);
});

test("stopping ends the request in the gateway too, once", async () => {
  const forever = ({ signal }) => {
    const body = new ReadableStream({
      start: (controller) => signal.addEventListener("abort", () => controller.error(signal.reason)),
    });
    return new Response(body);
  };
  const { run, calls } = begin(forever, () => new Response("{}"));
  const reading = run.read("v1/completions", {});
  await new Promise((resolve) => setImmediate(resolve));
  run.stop();
  await reading;
  run.stop();
  assert.deepEqual([run.error, run.notice], [null, "Stopped."]);
  const id = calls[0].headers["Idempotency-Key"];
  assert.deepEqual(
    calls.slice(1).map(({ method, path }) => [method, path]),
    [["DELETE", `v1/requests/${id}`]],
  );
});

test("the answer of a request that was sent before is read from its beginning", async () => {
  const { run, choices, calls } = begin(() => new Response(chunk(0, "a", [1]) + END));
  const { id } = run;
  await run.readAgain();
  assert.equal(choices[0].text, "a");
  assert.deepEqual(calls[0].path, `v1/requests/${id}/stream`);
  assert.equal("Last-Event-ID" in calls[0].headers, false);
  assert.ok(run.facts.includes("3 tokens"));
});

test("a request that is forgotten is an error", async () => {
  const gone = JSON.stringify({ error: { message: "gone", code: "REQUEST_EXPIRED" } });
  const { run } = begin(() => new Response(gone, { status: 404 }));
  await run.readAgain();
  assert.deepEqual([run.error.code, run.isRunning], ["REQUEST_EXPIRED", false]);
});
