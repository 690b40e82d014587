import assert from "node:assert/strict";
import test from "node:test";

import { EventParser, readEvents } from "../../../../../../gateway/fronts/page/static/events.js";

const STREAM =
  'id: 0:1:2\ndata: {"a": "é\\n"}\n\n: a comment\n\nid: 0:2:4\r\ndata: one\r\ndata: two\r\n\r\ndata:[DONE]\n\n';
const EVENTS = [
  { id: "0:1:2", data: '{"a": "é\\n"}' },
  { id: "0:2:4", data: "one\ntwo" },
  { id: "0:2:4", data: "[DONE]" },
];

async function collect(events) {
  const all = [];
  for await (const event of events) all.push(event);
  return all;
}

function body(pieces) {
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(piece);
      controller.close();
    },
  });
}

test("events come out whole wherever their text is cut", () => {
  for (let cut = 0; cut <= STREAM.length; cut++) {
    const parser = new EventParser();
    assert.deepEqual(
      [...parser.feed(STREAM.slice(0, cut)), ...parser.feed(STREAM.slice(cut))],
      EVENTS,
      `cut at ${cut}`,
    );
  }
});

test("characters come out whole wherever their bytes are cut", async () => {
  const bytes = new TextEncoder().encode(STREAM);
  for (let cut = 0; cut <= bytes.length; cut++) {
    assert.deepEqual(await collect(readEvents(body([bytes.slice(0, cut), bytes.slice(cut)]))), EVENTS);
  }
});

test("an event that was not ended is none", () => {
  assert.deepEqual(new EventParser().feed("data: half\n"), []);
});

test("whoever stops reading closes the body", async () => {
  let cancelled = false;
  const stream = new ReadableStream({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: more\n\n")),
    cancel: () => (cancelled = true),
  });
  for await (const _ of readEvents(stream)) break;
  assert.ok(cancelled);
});
