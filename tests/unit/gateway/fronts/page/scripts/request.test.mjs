import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import test from "node:test";

import { asCommand, makeRequest } from "../../../../../../gateway/fronts/page/static/request.js";

const FIELDS = {
  mode: "completion",
  prompt: "Once",
  temperature: "0.5",
  top_p: "",
  top_k: " ",
  max_tokens: "8",
  seed: "0",
  logprobs: "3",
  n: "2",
};
const ALWAYS = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };

test("a completion has what the form says and nothing of what it leaves empty", () => {
  const { path, body } = makeRequest({ fields: FIELDS, messages: [], model: "demo" });
  assert.equal(path, "v1/completions");
  const told = { model: "demo", prompt: "Once", max_tokens: 8, temperature: 0.5, seed: 0, n: 2, logprobs: 3 };
  assert.deepEqual(body, { ...told, ...ALWAYS });
});

test("a chat has messages, one answer, and its own form of logprobs", () => {
  const messages = [{ role: "user", content: "Hi" }];
  const fields = { ...FIELDS, mode: "chat", tokens: "on" };
  const { path, body } = makeRequest({ fields, messages, model: "" });
  assert.equal(path, "v1/chat/completions");
  const told = { messages, max_tokens: 8, temperature: 0.5, seed: 0, logprobs: true, top_logprobs: 3 };
  assert.deepEqual(body, { ...told, ...ALWAYS });
  for (const other of [{ logprobs: "" }, { tokens: undefined }]) {
    const bare = makeRequest({ fields: { ...fields, ...other }, messages, model: "" });
    assert.equal("logprobs" in bare.body, false);
  }
});

test("what is no number goes to the server as it is", () => {
  const { body } = makeRequest({ fields: { ...FIELDS, temperature: "hot" }, messages: [], model: "" });
  assert.equal(body.temperature, "hot");
});

test("the command is one for a shell, whatever the prompt holds", () => {
  const body = { prompt: "it's $HOME `id` \\ \"x\"\n'; echo no", return_token_ids: true, stream_options: {} };
  const command = asCommand("http://127.0.0.1:1/v1", body, false).replace(/^curl/, "printf '%s\\0'");
  const words = execFileSync("sh", ["-c", command], { encoding: "utf-8" }).split("\0").slice(0, -1);
  assert.deepEqual(words.slice(0, -1), [
    "--no-buffer",
    "http://127.0.0.1:1/v1",
    "-H",
    "Content-Type: application/json",
    "-d",
  ]);
  assert.deepEqual(JSON.parse(words.at(-1)), { prompt: body.prompt });
});

test("a key is named and not told", () => {
  assert.match(asCommand("http://h/", {}, true), /"Authorization: Bearer \$BLOCKYARD_API_KEY"/);
  assert.doesNotMatch(asCommand("http://h/", {}, false), /Authorization/);
});

test("a schema and tools go as the API has them; what is no JSON goes as it is", () => {
  const f = { name: "f", parameters: {} };
  const fields = { ...FIELDS, mode: "chat", schema: '{"type": "object"}', tools: JSON.stringify([f]) };
  const { body } = makeRequest({ fields, messages: [], model: "" });
  const schema = { type: "object" };
  assert.deepEqual(body.response_format, { type: "json_schema", json_schema: { name: "answer", schema } });
  assert.deepEqual(body.tools, [{ type: "function", function: f }]);
  const wrong = makeRequest({ fields: { ...fields, schema: "{", tools: "f" }, messages: [], model: "" }).body;
  assert.deepEqual([wrong.response_format.json_schema.schema, wrong.tools], ["{", "f"]);
  const completion = makeRequest({ fields: { ...fields, mode: "completion" }, messages: [], model: "" }).body;
  assert.equal("tools" in completion, false);
  assert.ok(completion.response_format);
});
