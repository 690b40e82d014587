// Copies texts.

import { make } from "./elements.js";
import { announce } from "./tokens.js";

const SHOWN_MILLISECONDS = 2000;

/** Copies a text, and has the button that asked for it say whether that worked. */
export async function copyFrom(button, text) {
  const outcome = (await copy(text)) ? "Copied" : "Not copied";
  const label = (button.dataset.label ??= button.textContent);
  button.textContent = outcome;
  announce(outcome);
  setTimeout(() => (button.textContent = label), SHOWN_MILLISECONDS);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // There is none on plain HTTP, but from this machine itself.
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const field = make("textarea", { className: "unseen", value: text, "aria-hidden": "true" });
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isDone;
}
