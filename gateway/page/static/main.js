// Puts the page together.

import { Board } from "./board.js";
import { Gateway } from "./client.js";
import { byId } from "./elements.js";
import { Playground } from "./playground.js";

// Of this tab, and gone with it.
const KEY = "blockyard.key";

const gateway = new Gateway();
gateway.key = sessionStorage.getItem(KEY) ?? "";
const playground = new Playground(gateway);
const board = new Board(gateway, () => playground.meter.take());

board.onReady = async () => {
  try {
    const [model] = await gateway.models();
    playground.model = model?.id ?? "";
  } catch {
    // Then the request names no model, and its answer says what is wrong.
    playground.model = "";
  }
  byId("model").textContent = playground.model;
  playground.showCommand();
};

byId("key-form").addEventListener("submit", (event) => event.preventDefault());
byId("key").value = gateway.key;
byId("key").addEventListener("change", ({ target }) => {
  // What is copied may bring along what cannot be seen, and what no header can hold.
  gateway.key = target.value.replace(/[^\x21-\x7e]/g, "");
  if (gateway.key) sessionStorage.setItem(KEY, gateway.key);
  else sessionStorage.removeItem(KEY);
  playground.showCommand();
  board.start();
});
board.start();
