// Times an answer as this page sees it: its first token, the tokens between, its end. In seconds.

/** One answer. `now` is given by whoever calls. */
export class Timing {
  #begun;
  #lastOf = new Map();
  firstToken = null;
  numTokens = 0;

  constructor(now) {
    this.#begun = now;
  }

  /** Takes note of tokens of a choice; returns the time for each of them since the last ones, or null. */
  note(choice, numTokens, now) {
    if (!numTokens) return null;
    this.firstToken ??= now - this.#begun;
    this.numTokens += numTokens;
    const last = this.#lastOf.get(choice);
    this.#lastOf.set(choice, now);
    return last === undefined ? null : (now - last) / numTokens;
  }

  /** Gives tokens a second behind the first one, or null. */
  rate(now) {
    const elapsed = now - this.#begun - (this.firstToken ?? 0);
    return this.numTokens > 1 && elapsed > 0 ? (this.numTokens - 1) / elapsed : null;
  }
}

/** Gathers latencies until somebody asks for their means. */
export class Meter {
  #firstTokens = [];
  #interTokens = [];

  /** Adds the time to an answer's first token. */
  addFirst(seconds) {
    this.#firstTokens.push(seconds);
  }

  /** Adds a time between tokens. */
  addNext(seconds) {
    this.#interTokens.push(seconds);
  }

  /** Gives the means since the last call; null where there was nothing. */
  take() {
    const times = { pageFirstToken: mean(this.#firstTokens), pageInterToken: mean(this.#interTokens) };
    this.#firstTokens = [];
    this.#interTokens = [];
    return times;
  }
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}
