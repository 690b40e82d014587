import assert from "node:assert/strict";
import test from "node:test";

import { Conversation } from "../../../../../../gateway/fronts/page/static/conversation.js";
import { Store } from "../../../../../../gateway/fronts/page/static/store.js";

/** A browser's storage. */
class Area {
  texts = new Map();

  getItem(name) {
    return this.texts.get(name) ?? null;
  }

  setItem(name, text) {
    this.texts.set(name, text);
  }

  removeItem(name) {
    this.texts.delete(name);
  }
}

function kept() {
  const area = new Area();
  return { area, store: new Store(() => area, "/") };
}

const contents = (conversation) => conversation.messages.map(({ content }) => content);

test("a conversation is there again, and another path has its own", () => {
  const { area, store } = kept();
  const conversation = new Conversation(store);
  conversation.ask("one");
  conversation.answer({ text: "two" }, true);
  assert.ok(conversation.save());
  assert.deepEqual(new Conversation(store).messages, conversation.messages);
  assert.deepEqual(new Conversation(new Store(() => area, "/other/")).messages, []);
  conversation.clear();
  assert.deepEqual(new Conversation(store).messages, []);
  assert.equal(area.texts.size, 0);
});

test("an answer so far is kept as one that is not whole", () => {
  const { store } = kept();
  const conversation = new Conversation(store);
  conversation.ask("one");
  conversation.save({ text: "tw" });
  assert.deepEqual(contents(conversation), ["one"]);
  const again = new Conversation(store);
  assert.deepEqual(again.messages.at(-1), { role: "assistant", content: "tw", isWhole: false });
  again.askAgain();
  assert.deepEqual(contents(again), ["one"]);
  assert.equal(again.undo(), "");
  assert.deepEqual(contents(again), ["one", "tw"]);
});

test("a message that is changed takes the place of what followed it, unless nothing comes of it", () => {
  const conversation = new Conversation(kept().store);
  for (const text of ["a", "c"]) {
    conversation.ask(text);
    conversation.answer({ text: text.toUpperCase() }, true);
  }
  const before = conversation.messages;
  conversation.ask("b", 0);
  assert.deepEqual(conversation.toSend(), [{ role: "user", content: "b" }]);
  assert.equal(conversation.undo(), "b");
  assert.deepEqual(conversation.messages, before);
  conversation.ask("b", 2);
  conversation.answer({ text: "B" }, true);
  assert.deepEqual(contents(conversation), ["a", "A", "b", "B"]);
  assert.equal(conversation.messages[0], before[0], "what stays is the same");
  assert.equal(conversation.undo(), "", "an answer came of it");
});

test("another answer takes the place of the last one", () => {
  const conversation = new Conversation(kept().store);
  conversation.ask("a");
  conversation.answer({ text: "b" }, true);
  conversation.askAgain();
  assert.deepEqual(contents(conversation), ["a"]);
  conversation.askAgain();
  assert.deepEqual(contents(conversation), ["a"], "a message without an answer stays");
  conversation.answer({ text: "c" }, true);
  assert.deepEqual(contents(conversation), ["a", "c"]);
});

for (const text of ["", "{", "null", "[]", '{"version":2,"messages":[]}', '{"version":1,"messages":[{"role":"x"}]}']) {
  test(`what cannot be read is no conversation: ${text || "nothing"}`, () => {
    const { area, store } = kept();
    area.setItem("blockyard:/:chat", text);
    assert.deepEqual(new Conversation(store).messages, []);
  });
}

test("a browser that keeps nothing has conversations too", () => {
  const refused = new Store(() => {
    throw new DOMException("denied", "SecurityError");
  }, "/");
  const conversation = new Conversation(refused);
  conversation.ask("a");
  assert.equal(conversation.save(), false);
  assert.deepEqual(contents(conversation), ["a"]);
});

test("a store without room says so", () => {
  const area = new Area();
  area.setItem = () => {
    throw new DOMException("full", "QuotaExceededError");
  };
  assert.equal(new Store(() => area, "/").set("chat", "x"), false);
});

test("what an answer has beside its text is there again, and its calls are sent", () => {
  const { store } = kept();
  const conversation = new Conversation(store);
  conversation.ask("one");
  const calls = [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }];
  conversation.answer({ text: "", reasoning: "hm", calls }, true);
  conversation.save();
  const again = new Conversation(store);
  assert.deepEqual(again.messages.at(-1), { role: "assistant", content: "", isWhole: true, reasoning: "hm", calls });
  assert.deepEqual(again.toSend().at(-1), { role: "assistant", content: "", tool_calls: calls });
});
