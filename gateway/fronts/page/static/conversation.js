// A chat's messages, kept over a reload. Messages do not change: one that is other is another object. Knows nothing of
// elements and of requests.

const NAME = "chat";
const ROLES = new Set(["user", "assistant"]);

/**
 * Messages as {role, content, isWhole}; an answer that ended too early is not whole, and may have `reasoning` and
 * `calls`.
 */
export class Conversation {
  messages = [];
  #store;
  #before = null;

  constructor(store) {
    this.#store = store;
    this.load();
  }

  /** Reads what was kept; what cannot be read is none. */
  load() {
    this.messages = parse(this.#store.get(NAME));
    this.#before = null;
  }

  /** Keeps it, with an answer so far if there is one; returns whether that worked. */
  save(answerSoFar = null) {
    const partial = answerSoFar?.text ? [answer(answerSoFar, false)] : [];
    const messages = [...this.messages, ...partial];
    return this.#store.set(NAME, messages.length ? JSON.stringify({ version: 1, messages }) : "");
  }

  /** The messages before one of them, by its index, as the API takes them. */
  toSend(end = this.messages.length) {
    return this.messages
      .slice(0, end)
      .map(({ role, content, calls }) => ({ role, content, ...(calls?.length ? { tool_calls: calls } : {}) }));
  }

  /** Adds a message behind the first ones, in place of what follows them. */
  ask(content, place = this.messages.length) {
    this.#before = { messages: this.messages, asked: content };
    this.messages = [...this.messages.slice(0, place), { role: "user", content, isWhole: true }];
  }

  /** Takes the last answer away, if there is one, so that another one can be asked for. */
  askAgain() {
    this.#before = { messages: this.messages, asked: "" };
    if (this.messages.at(-1)?.role === "assistant") this.messages = this.messages.slice(0, -1);
  }

  /** Adds the answer, a choice; returns its message. */
  answer(choice, isWhole) {
    this.#before = null;
    const message = answer(choice, isWhole);
    this.messages = [...this.messages, message];
    return message;
  }

  /** Takes back what was asked, of which came nothing; returns its text, empty if it was there before. */
  undo() {
    const { messages, asked } = this.#before ?? { messages: this.messages, asked: "" };
    this.messages = messages;
    this.#before = null;
    return asked;
  }

  /** Forgets everything. */
  clear() {
    this.messages = [];
    this.#before = null;
    this.save();
  }
}

function answer({ text, reasoning, calls }, isWhole) {
  const parts = { ...(reasoning ? { reasoning } : {}), ...(calls?.length ? { calls } : {}) };
  return { role: "assistant", content: text, isWhole, ...parts };
}

function parse(text) {
  try {
    const { version, messages } = JSON.parse(text ?? "{}");
    const isKnown = ({ role, content }) => ROLES.has(role) && typeof content === "string";
    if (version !== 1 || !messages.every(isKnown)) return [];
    return messages.map((message) => {
      if (message.role === "assistant") return answer({ ...message, text: message.content }, message.isWhole !== false);
      return { role: message.role, content: message.content, isWhole: message.isWhole !== false };
    });
  } catch {
    return [];
  }
}
