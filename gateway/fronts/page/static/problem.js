// Shows an error with its reason and all that it names, at the fields that it is about.

import { ApiError } from "./client.js";
import { byId, make } from "./elements.js";
import { duration } from "./format.js";

// Parameters that have another name in the form.
const FIELDS = {
  messages: "prompt",
  top_logprobs: "logprobs",
  max_completion_tokens: "max_tokens",
  response_format: "schema",
};

/** Shows an error; null: none. */
export function showProblem(error) {
  const box = byId("problem");
  box.hidden = error === null;
  box.replaceChildren();
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  if (error === null) return;
  const violations = error.violations ?? [];
  // Of several the message is their sum.
  const message = violations.length > 1 ? "Some of it cannot be:" : error.message;
  box.append(make("p", {}, make("strong", {}, title(error)), " ", message));
  if (violations.length > 1) box.append(make("ul", {}, ...violations.map(item)));
  for (const { param } of violations) mark(param);
  if (error.retryAfterSeconds != null) box.append(make("p", {}, `Try again in ${duration(error.retryAfterSeconds)}.`));
  if (error.status === 401) askForKey();
}

function title(error) {
  if (error instanceof ApiError) return error.code || `HTTP ${error.status}`;
  return "No answer";
}

function item({ param, message }) {
  return make("li", {}, make("code", {}, param ?? "body"), ` ${message}`);
}

function mark(param) {
  const name = (param ?? "").split(/[.[]/)[0];
  const field = byId("form").elements[FIELDS[name] ?? name];
  if (!(field instanceof Element)) return;
  field.setAttribute("aria-invalid", "true");
  // It may be folded away.
  field.closest("details")?.setAttribute("open", "");
}

function askForKey() {
  byId("key-box").open = true;
  byId("key").focus();
}
