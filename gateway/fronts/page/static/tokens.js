// Shows a choice token by token, and on hover or by the arrow keys what else could have stood in a token's place.

import { ranked, visible } from "./answer.js";
import { byId, framed, make } from "./elements.js";
import { percent } from "./format.js";

const GAP = 6;
const LABEL = "Answer; the arrow keys go through its tokens";

/** One choice on the page; follows it as it grows. */
export class TokenView {
  #choice;
  #card;
  #spans = [];
  #numSettled = 0;
  #current = -1;

  constructor(choice, card) {
    this.#choice = choice;
    this.#card = card;
    this.element = make("div", { className: "answer growing", tabIndex: 0, role: "group", "aria-label": LABEL });
    this.element.addEventListener("pointerover", (event) => this.#enter(this.#spans.indexOf(event.target)));
    this.element.addEventListener("pointerleave", () => this.#enter(-1));
    this.element.addEventListener("blur", () => this.#enter(-1));
    this.element.addEventListener("keydown", (event) => this.#press(event));
  }

  /** Takes note that there is more, which it shows with the next frame. */
  grow = framed(() => this.#show());

  /** Shows all that there is at once, since no more will come: a frame may be long in coming. */
  end() {
    this.element.classList.remove("growing");
    this.#show();
  }

  #show() {
    const choice = this.#choice;
    for (let index = this.#numSettled; index < choice.length; index++) {
      const { text, tokens } = choice.piece(index);
      const span = (this.#spans[index] ??= this.element.appendChild(make("span")));
      if (span.textContent !== text) span.textContent = text;
      if (tokens.length) {
        span.className = "token";
        span.style.setProperty("--surprise", surprise(tokens));
      }
    }
    while (this.#numSettled < choice.length && choice.isSettled(this.#numSettled)) this.#numSettled++;
  }

  #press(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") this.#enter(-1);
    else if (event.key === "Home") this.#enter(0);
    else if (event.key === "End") this.#enter(this.#spans.length - 1);
    else if (event.key in steps)
      this.#enter(Math.min(this.#spans.length - 1, Math.max(0, this.#current + steps[event.key])));
    else return;
    event.preventDefault();
    if (this.#current >= 0) announce(described(this.#choice.piece(this.#current).tokens));
  }

  #enter(index) {
    this.#spans[this.#current]?.classList.remove("current");
    const { tokens } = index in this.#spans ? this.#choice.piece(index) : { tokens: [] };
    this.#current = tokens.length ? index : -1;
    this.#spans[this.#current]?.classList.add("current");
    if (this.#current < 0) this.#card.hide();
    else this.#card.show(tokens, this.#spans[index]);
  }
}

/** Gives how much of a surprise tokens were, from 0 to 1: what is more or less likely stays almost without a tint. */
function surprise(tokens) {
  const share = Math.exp(Math.min(...tokens.map((token) => token.logprob)));
  return ((1 - share) ** 2).toFixed(3);
}

/** The card beside a token: each token in its place by probability, the chosen one marked. */
export class TokenCard {
  #element = byId("card");

  constructor() {
    addEventListener("scroll", () => this.hide(), { passive: true, capture: true });
  }

  /** Shows what is known of the tokens of a piece, below it or above. */
  show(tokens, anchor) {
    this.#element.replaceChildren(...tokens.map(table));
    this.#element.hidden = false;
    const place = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const { width, height } = this.#element.getBoundingClientRect();
    const { clientWidth, clientHeight } = document.documentElement;
    const isBelow = place.bottom + GAP + height <= clientHeight;
    const left = Math.max(GAP, Math.min(place.left, clientWidth - width - GAP));
    const top = isBelow ? place.bottom + GAP : Math.max(GAP, place.top - GAP - height);
    this.#element.style.left = `${left}px`;
    this.#element.style.top = `${top}px`;
  }

  /** Hides it. */
  hide() {
    this.#element.hidden = true;
  }
}

function table(token) {
  const rows = ranked(token).map(({ text, logprob, isChosen }) => {
    const share = Math.exp(logprob);
    const bar = make("span", { className: "bar" });
    bar.style.setProperty("--share", String(share));
    const row = make(
      "tr",
      {},
      make("th", { scope: "row" }, visible(text)),
      make("td", {}, percent(share)),
      make("td", {}, bar),
    );
    row.classList.toggle("chosen", Boolean(isChosen));
    return row;
  });
  const caption = make("caption", {}, `log probability ${token.logprob.toFixed(3)}`);
  return make("table", {}, caption, make("tbody", {}, ...rows));
}

function described(tokens) {
  return tokens.map((token) => `${visible(token.text)}, ${percent(Math.exp(token.logprob))}`).join("; ");
}

/** Has screen readers say something. */
export function announce(text) {
  byId("announcer").textContent = text;
}
