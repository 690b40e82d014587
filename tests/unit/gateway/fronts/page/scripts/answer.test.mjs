import assert from "node:assert/strict";
import test from "node:test";

import { Choice, ranked, visible } from "../../../../../../gateway/fronts/page/static/answer.js";

function completion(text, tokens, starts) {
  const logprobs = {
    tokens,
    token_logprobs: tokens.map((_, index) => -index),
    top_logprobs: tokens.map((token) => ({ [token]: -0.5, other: -1 })),
    text_offset: starts,
  };
  return { index: 0, text, logprobs, finish_reason: null, stop_reason: null };
}

function chat(text, parts) {
  const content = parts.map(([token, bytes]) => ({ token, bytes, logprob: -1, top_logprobs: [] }));
  return { index: 0, delta: { content: text }, logprobs: { content }, finish_reason: null };
}

function pieces(choice) {
  return Array.from({ length: choice.length }, (_, index) => choice.piece(index));
}

const texts = (choice) => pieces(choice).map((piece) => piece.text);
const tokens = (choice) => pieces(choice).map((piece) => piece.tokens.map((token) => token.text));

test("a completion is cut where its offsets say", () => {
  const choice = new Choice();
  choice.take(completion("Hello", ["He", "llo"], [0, 2]));
  choice.take(completion(" 🙂!", [" ", "🙂", "!"], [5, 6, 7]));
  assert.equal(choice.text, "Hello 🙂!");
  assert.deepEqual(texts(choice), ["He", "llo", " ", "🙂", "!"]);
});

test("the tokens of one character are one piece", () => {
  const choice = new Choice();
  choice.take(completion("aéb", ["a", "\ufffd", "\ufffd", "b"], [0, 1, 1, 2]));
  assert.deepEqual(texts(choice), ["a", "é", "b"]);
  assert.deepEqual(tokens(choice), [["a"], ["\ufffd", "\ufffd"], ["b"]]);
});

test("a chat is cut by the bytes of its tokens", () => {
  const choice = new Choice();
  choice.take({ index: 0, delta: { role: "assistant", content: "" }, logprobs: null });
  choice.take(
    chat("aé", [
      ["a", [97]],
      ["\ufffd", [0xc3]],
      ["\ufffd", [0xa9]],
    ]),
  );
  choice.take(chat("🙂b", [["🙂b", [...new TextEncoder().encode("🙂b")]]]));
  assert.deepEqual(texts(choice), ["a", "é", "🙂b"]);
});

test("a special token has no text, and shares the place of what follows", () => {
  const choice = new Choice();
  choice.take(
    chat("ab", [
      ["a", [97]],
      ["<|end|>", null],
      ["b", [98]],
    ]),
  );
  assert.deepEqual(texts(choice), ["a", "b"]);
  assert.deepEqual(tokens(choice)[1], ["<|end|>", "b"]);
});

test("text that is held back comes later than its tokens", () => {
  const choice = new Choice();
  choice.take(completion("", ["on", "e"], [0, 2]));
  assert.deepEqual(texts(choice), ["", ""]);
  assert.equal(choice.isSettled(0), false);
  choice.take(completion("one two", ["two"], [4]));
  assert.deepEqual(texts(choice), ["on", "e ", "two"]);
  assert.deepEqual(
    [0, 1, 2].map((index) => choice.isSettled(index)),
    [true, true, false],
  );
});

test("without log probabilities the text is one piece", () => {
  const choice = new Choice();
  choice.take({ index: 0, text: "a", logprobs: null });
  choice.take({ index: 0, text: "b", logprobs: null, finish_reason: "length", stop_reason: null });
  assert.deepEqual(pieces(choice), [{ text: "ab", tokens: [] }]);
  assert.equal(choice.finishReason, "length");
});

test("hostile text stays text", () => {
  const choice = new Choice();
  choice.take(completion("<script>", ["<script>"], [0]));
  assert.equal(choice.piece(0).text, "<script>");
});

test("alternatives come by probability, with the chosen one among them once", () => {
  const token = {
    text: "b",
    logprob: -2,
    top: [
      { text: "a", logprob: -1 },
      { text: "b", logprob: -2 },
      { text: "c", logprob: -3 },
    ],
  };
  assert.deepEqual(
    ranked(token).map((each) => each.text),
    ["a", "b", "c"],
  );
  assert.deepEqual(
    ranked(token)
      .filter((each) => each.isChosen)
      .map((each) => each.text),
    ["b"],
  );
});

test("what cannot be seen is made visible", () => {
  assert.equal(visible(" a b\n"), "␣a b↵");
  assert.equal(visible("\t\t"), "⇥⇥");
  assert.equal(visible("  "), "␣␣");
  assert.equal(visible(""), "∅");
});

test("reasoning and calls of tools grow beside the text", () => {
  const choice = new Choice();
  const grow = (delta) => choice.take({ index: 0, delta, logprobs: null });
  grow({ reasoning_content: "h" });
  grow({ reasoning_content: "m" });
  grow({ content: "I look." });
  grow({ tool_calls: [{ index: 0, id: "a", type: "function", function: { name: "f", arguments: "" } }] });
  grow({ tool_calls: [{ index: 0, function: { arguments: '{"x"' } }] });
  grow({ tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] });
  grow({ tool_calls: [{ index: 1, id: "b", type: "function", function: { name: "g", arguments: "{}" } }] });
  assert.equal(choice.reasoning, "hm");
  assert.equal(choice.text, "I look.");
  assert.deepEqual(choice.calls, [
    { id: "a", type: "function", function: { name: "f", arguments: '{"x": 1}' } },
    { id: "b", type: "function", function: { name: "g", arguments: "{}" } },
  ]);
});
