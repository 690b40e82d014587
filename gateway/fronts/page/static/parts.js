// What an answer has beside its text: reasoning above it, calls of tools below. Each view follows a choice as it grows.

import { framed, make } from "./elements.js";

class PartView {
  /** `choice` has what is shown. The element is empty while that is nothing. */
  constructor(choice) {
    this.choice = choice;
    this.element = make("div");
  }

  /** Takes note that there is more, which it shows with the next frame. */
  grow = framed(() => this.show());

  /** Shows all that there is at once, since no more will come: a frame may be long in coming. */
  end() {
    this.show();
  }
}

/** What the model thought, which can be folded away. */
export class ReasoningView extends PartView {
  #text = null;

  /** Shows all that there is. */
  show() {
    if (!this.choice.reasoning) return;
    if (!this.#text) {
      this.#text = make("div", { className: "reasoning" });
      this.element.append(make("details", { open: true }, make("summary", {}, "Reasoning"), this.#text));
    }
    this.#text.textContent = this.choice.reasoning;
  }
}

/** The calls of tools, each with its arguments as the model wrote them. */
export class CallsView extends PartView {
  /** Shows all that there is. */
  show() {
    if (!this.choice.calls.length) return;
    const shown = this.choice.calls.map(({ function: called }) =>
      make("li", {}, make("strong", {}, called.name), make("code", {}, called.arguments)),
    );
    this.element.replaceChildren(make("ul", { className: "calls", "aria-label": "Calls of tools" }, ...shown));
  }
}
