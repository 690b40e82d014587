// Keeps texts in the browser, under names that a page below another path does not share. Where a browser keeps nothing,
// all works but that. Knows nothing of what the texts say.

/** Texts by name. `area` gives the browser's storage, and may throw, as where it is turned off. */
export class Store {
  #area;
  #prefix;

  constructor(area, path) {
    this.#area = area;
    this.#prefix = `blockyard:${path}:`;
  }

  /** Gives a text, or null. */
  get(name) {
    try {
      return this.#area().getItem(this.#prefix + name);
    } catch {
      return null;
    }
  }

  /** Keeps a text; an empty one is forgotten. Returns whether that worked: there may be no room. */
  set(name, text) {
    try {
      if (text) this.#area().setItem(this.#prefix + name, text);
      else this.#area().removeItem(this.#prefix + name);
      return true;
    } catch {
      return false;
    }
  }

  /** Calls a function when another tab changes a text. */
  onChange(name, notify) {
    addEventListener("storage", ({ key, storageArea }) => {
      if (key === this.#prefix + name && storageArea === this.#area()) notify();
    });
  }
}

/** What stays until it is cleared. */
export function browserStore() {
  return new Store(() => localStorage, path());
}

/** What goes with its tab. */
export function tabStore() {
  return new Store(() => sessionStorage, path());
}

function path() {
  return new URL(".", document.baseURI).pathname;
}
