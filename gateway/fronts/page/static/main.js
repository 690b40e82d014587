// Puts the page together.

import { Board } from "./board.js";
import { Gateway } from "./client.js";
import { byId } from "./elements.js";
import { Playground } from "./playground.js";
import { tabStore } from "./store.js";

const KEY = "key";
const MODEL = "model";

const ofTab = tabStore();
const gateway = new Gateway();
gateway.key = ofTab.get(KEY) ?? "";
const playground = new Playground(gateway);
let chosen = ofTab.get(MODEL) ?? "";
const board = new Board(gateway, () => playground.meter.take(), chosen);

board.onReady = async () => {
  try {
    const models = await gateway.models();
    // A model that is not listed yet is asked by its name.
    show(chosen ? (models.find(({ id }) => id === chosen) ?? { id: chosen }) : models[0]);
  } catch {
    // Then the request names no model, and its answer says what is wrong.
    show(chosen ? { id: chosen } : undefined);
  }
};
board.onChoose = (name) => {
  chosen = name;
  ofTab.set(MODEL, name);
  return board.onReady();
};

function show(model) {
  playground.setModel(model);
  byId("model").textContent = model?.id ?? "";
}

// Of what is above the conversation, which fills the rest of the window.
new ResizeObserver(([{ target }]) => {
  document.documentElement.style.setProperty("--head", `${target.offsetHeight}px`);
}).observe(document.querySelector("header"));

byId("key-form").addEventListener("submit", (event) => event.preventDefault());
byId("key").value = gateway.key;
byId("key").addEventListener("change", ({ target }) => {
  // What is copied may bring along what cannot be seen, and what no header can hold.
  gateway.key = target.value.replace(/[^\x21-\x7e]/g, "");
  ofTab.set(KEY, gateway.key);
  playground.showCommand();
  board.start();
});
board.start();
