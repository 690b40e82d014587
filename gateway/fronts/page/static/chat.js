// A conversation on the page: its messages, what can be done with each, and where it is scrolled to. Sends nothing.

import { copyFrom } from "./clipboard.js";
import { byId, make } from "./elements.js";
import { CallsView, ReasoningView } from "./parts.js";
import { RenderedView } from "./rendered.js";
import { TokenView } from "./tokens.js";

// So near to its end a conversation follows what is added.
const NEAR_PIXELS = 40;
const NOT_WHOLE = "This answer is not whole: it was stopped, or its connection was lost.";

/** The messages of a conversation, and the answer that is being read. */
export class Chat {
  /** Called when another answer to the last message is wanted. */
  onAgain = () => {};
  /** Called with the text of a message that is to be changed, and with an empty one when it is not any more. */
  onEdit = () => {};
  #conversation;
  #card;
  #log = byId("conversation");
  // Of each message {message, element}.
  #items = [];
  // Of the answer that is being read {choice, element}.
  #growing = null;
  #editing = null;
  #isAtEnd = true;

  constructor(conversation, card) {
    this.#conversation = conversation;
    this.#card = card;
    this.#log.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    this.#log.addEventListener("click", ({ target }) => {
      if (target.matches(".code .copy")) copyFrom(target, target.closest(".code").querySelector("code").textContent);
    });
    byId("to-end").addEventListener("click", () => this.#goToEnd());
    byId("keep").addEventListener("click", () => this.stopEditing());
    const follow = () => this.#isAtEnd && this.#goToEnd();
    new MutationObserver(follow).observe(this.#log, { subtree: true, childList: true, characterData: true });
    new ResizeObserver(follow).observe(this.#log);
    this.show();
  }

  /** The messages that a next one goes behind, as the API takes them. */
  get messages() {
    return this.#conversation.toSend(this.#editing ?? undefined);
  }

  /** Adds what a person says, or puts it in the place of what is being edited. */
  ask(text) {
    this.#conversation.ask(text, this.#editing ?? undefined);
    this.stopEditing();
    this.#save();
    this.#isAtEnd = true;
  }

  /** Makes room for another answer to the last message. */
  askAgain() {
    this.stopEditing();
    this.#conversation.askAgain();
    this.show();
    this.#isAtEnd = true;
  }

  /** Shows a choice as it grows; returns its views. */
  begin(choice, hasTokens) {
    this.show();
    const views = [...partsOf(choice), ...(hasTokens ? [new TokenView(choice, this.#card)] : [])];
    const element = article("assistant", ...views.map((view) => view.element));
    this.#growing = { choice, element };
    this.#log.append(element);
    return views;
  }

  /** Keeps the answer that was read; returns the text to be sent again, if nothing came of it. */
  end(isWhole) {
    const { choice, element } = this.#growing;
    this.#growing = null;
    if (!choice.text && !choice.calls.length && !isWhole) {
      element.remove();
      const asked = this.#conversation.undo();
      this.#save();
      return asked;
    }
    const message = this.#conversation.answer(choice, isWhole);
    this.#items.push({ message, element });
    this.#finish(element, message);
    this.#save();
    return "";
  }

  /** Keeps what there is, as when the page is left while an answer is being read. */
  keep() {
    this.#conversation.save(this.#growing?.choice);
  }

  /** Reads again what was kept, as when another tab changed it. */
  load() {
    this.stopEditing();
    this.#conversation.load();
    this.show();
  }

  /** Forgets all. What is being read is not kept. */
  clear() {
    this.#growing = null;
    this.stopEditing();
    this.#conversation.clear();
    this.show();
  }

  /** Makes the page show the conversation; what stayed is not made again. */
  show() {
    const { messages } = this.#conversation;
    const changed = this.#items.findIndex(({ message }, index) => message !== messages[index]);
    if (changed >= 0) this.#items.length = changed;
    for (const message of messages.slice(this.#items.length)) {
      const element = said(message);
      this.#finish(element, message);
      this.#items.push({ message, element });
    }
    const elements = new Set(this.#items.map(({ element }) => element));
    for (const child of [...this.#log.children]) if (!elements.has(child)) child.remove();
    for (const element of elements) if (!element.isConnected) this.#log.append(element);
  }

  /** Leaves a message as it is. */
  stopEditing() {
    if (this.#editing === null) return;
    this.#markEdited(null);
    this.onEdit("");
  }

  #save() {
    this.show();
    byId("not-kept").hidden = this.#conversation.save();
  }

  #finish(element, message) {
    if (!message.isWhole) element.append(make("p", { className: "cut" }, NOT_WHOLE));
    const isAnswer = message.role === "assistant";
    const again = button(isAnswer ? "Regenerate" : "Answer", () => this.onAgain());
    again.classList.add("again");
    const copy = button("Copy", ({ target }) => copyFrom(target, message.content));
    const edit = isAnswer ? [] : [button("Edit", () => this.#edit(message))];
    element.append(make("div", { className: "tools" }, copy, ...edit, again));
  }

  #edit(message) {
    this.#markEdited(this.#conversation.messages.indexOf(message));
    this.onEdit(message.content);
  }

  #markEdited(place) {
    this.#editing = place;
    byId("editing").hidden = place === null;
    for (const [index, { element }] of this.#items.entries())
      element.classList.toggle("superseded", place !== null && index >= place);
  }

  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    this.#isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_PIXELS;
    byId("to-end").hidden = this.#isAtEnd;
  }

  #goToEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
    this.#noteScroll();
  }
}

function article(role, ...content) {
  return make("article", { "data-role": role, "aria-label": role === "user" ? "You" : "Answer" }, ...content);
}

/** Shows a message that is there already. */
function said({ role, content, reasoning, calls }) {
  if (role === "user") return article(role, make("div", { className: "said" }, content));
  const views = partsOf({ text: content, reasoning: reasoning ?? "", calls: calls ?? [] });
  for (const view of views) {
    view.show();
    view.element.classList.remove("growing");
  }
  return article(role, ...views.map((view) => view.element));
}

/** Makes the views of an answer, in their order. */
function partsOf(choice) {
  return [new ReasoningView(choice), new RenderedView(choice), new CallsView(choice)];
}

function button(text, onClick) {
  const made = make("button", { type: "button" }, text);
  made.addEventListener("click", onClick);
  return made;
}
