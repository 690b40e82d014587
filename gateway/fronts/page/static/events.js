// Server-sent events out of a body's bytes. Knows nothing of what they say.

/** Cuts a text that comes in pieces into events. */
export class EventParser {
  #rest = "";
  #data = [];
  #id = "";

  /** Takes the next piece; returns the events that it completes, each as {id, data}. An id stays until the next one. */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      const event = this.#take(line.endsWith("\r") ? line.slice(0, -1) : line);
      if (event) events.push(event);
    }
    return events;
  }

  #take(line) {
    if (line === "") return this.#end();
    const colon = line.indexOf(":");
    if (colon === 0) return null; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    if (name === "id") this.#id = value;
    return null;
  }

  #end() {
    if (!this.#data.length) return null;
    const event = { id: this.#id, data: this.#data.join("\n") };
    this.#data = [];
    return event;
  }
}

/** Yields the events of a response's body; throws what reading it throws. */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(decoder.decode(value, { stream: true }));
    }
  } finally {
    // Whoever stops reading has no use for the rest.
    reader.cancel().catch(() => {});
  }
}
