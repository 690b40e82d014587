// What an answer has beside its text: reasoning above it, calls of tools below. Each view follows a choice as it grows.

import { framed, make } from "./elements.js";

class PartView {
  /** `choice` has what is shown; `element` is hidden while that is nothing. */
  constructor(choice, element) {
    this.choice = choice;
    this.element = element;
    this.element.hidden = true;
  }

  /** Takes note that there is more, which it shows with the next frame. */
  grow = framed(() => this.show());

  /** Takes note that no more will come. */
  end() {
    this.grow();
  }
}

/** What the model thought, which can be folded away. */
export class ReasoningView extends PartView {
  #text = make("div", { className: "reasoning" });

  constructor(choice) {
    super(choice, make("details", { open: true }));
    this.element.append(make("summary", {}, "Reasoning"), this.#text);
  }

  /** Shows all that there is. */
  show() {
    this.element.hidden = !this.choice.reasoning;
    this.#text.textContent = this.choice.reasoning;
  }
}

/** The calls of tools, each with its arguments as the model wrote them. */
export class CallsView extends PartView {
  constructor(choice) {
    super(choice, make("ul", { className: "calls", "aria-label": "Calls of tools" }));
  }

  /** Shows all that there is. */
  show() {
    this.element.hidden = !this.choice.calls.length;
    const shown = this.choice.calls.map(({ function: called }) =>
      make("li", {}, make("strong", {}, called.name), make("code", {}, called.arguments)),
    );
    this.element.replaceChildren(...shown);
  }
}
