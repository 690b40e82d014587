// Puts the page together.

import { Board } from "./board.js";
import { Gateway } from "./client.js";
import { byId } from "./elements.js";
import { Playground } from "./playground.js";
import { tabStore } from "./store.js";

const KEY = "key";

const ofTab = tabStore();
const gateway = new Gateway();
gateway.key = ofTab.get(KEY) ?? "";
const playground = new Playground(gateway);
const board = new Board(gateway, () => playground.meter.take());

board.onReady = async () => {
  try {
    const [model] = await gateway.models();
    show(model);
  } catch {
    // Then the request names no model, and its answer says what is wrong.
    show();
  }
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
