// The list of models: the state of each, the choice of the one that the page shows, and a button that loads one.

import { byId, make } from "./elements.js";
import { counted } from "./format.js";

const UNLOADED = "MODEL_STATE_UNLOADED";
// Of each state what is said of it, and how it is coloured.
const STATES = {
  MODEL_STATE_READY: ["loaded", "good"],
  MODEL_STATE_LOADING: ["loading", "middling"],
  [UNLOADED]: ["not loaded", ""],
  MODEL_STATE_FAILED: ["cannot be loaded", "bad"],
};

/** The models of a gateway that has several, or one that is loaded on demand; hidden elsewhere. */
export class ModelList {
  /** Called with the name of the model that somebody chooses. */
  onChoose = () => {};
  #load;
  #rows = new Map();

  /** `load(name)` loads a model, and throws what is wrong. */
  constructor(load) {
    this.#load = load;
  }

  /** Shows the models as /status tells them; `chosen` is the name of the one that the page shows. */
  show(models, chosen) {
    byId("models-box").hidden = models.length < 2 && !models.some((model) => model.starts_on_demand);
    // Rows stay, so that the focus does.
    if (models.map(({ name }) => name).join() !== [...this.#rows.keys()].join()) this.#fill(models);
    for (const model of models) this.#rows.get(model.name).show(model, model.name === chosen);
  }

  #fill(models) {
    const choose = (name) => this.onChoose(name);
    this.#rows = new Map(models.map(({ name }) => [name, new Row(name, choose, this.#load)]));
    byId("models").replaceChildren(...[...this.#rows.values()].map(({ element }) => element));
  }
}

class Row {
  #chip = make("span", { className: "chip" });
  #note = make("p", { className: "faint" });
  #problem = "";

  constructor(name, choose, load) {
    this.choice = make("input", { type: "radio", name: "shown" });
    this.choice.addEventListener("change", () => choose(name));
    this.button = make("button", { type: "button", "aria-label": `Load ${name}` }, "Load");
    this.button.addEventListener("click", () => this.#press(load(name)));
    this.element = make("div", {}, make("label", {}, this.choice, name), this.#chip, this.button, this.#note);
  }

  show({ state, message, num_requests: num }, isChosen) {
    const [text, colour] = STATES[state] ?? ["not ready", "bad"];
    this.choice.checked = isChosen;
    this.#chip.textContent = text;
    this.#chip.dataset.state = colour;
    this.button.hidden = state !== UNLOADED;
    const note = state === UNLOADED ? this.#problem : message;
    this.#note.textContent = [note, num ? counted(num, "request") : ""].filter(Boolean).join(" · ");
  }

  async #press(loading) {
    this.button.disabled = true;
    this.#problem = "";
    try {
      await loading;
    } catch (error) {
      this.#problem = error.message;
    }
    this.button.disabled = false;
  }
}
