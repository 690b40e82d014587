// Talks to the gateway that served the page: its OpenAI API, /status, and what to do when a stream breaks.
// Knows nothing of the page.

import { readEvents } from "./events.js";

const RESUME_SECONDS = 30;
const FIRST_DELAY_SECONDS = 0.25;
const MAX_DELAY_SECONDS = 2;
// A stream that ends with this goes on at another gateway, or at this one when it is back.
const GOES_ON = new Set(["DRAINING"]);

/** What the gateway refused, or failed at, in its own words. */
export class ApiError extends Error {
  constructor({ status = 0, code = "", message = "", violations = [], retryAfterSeconds = null }) {
    super(message);
    this.status = status;
    this.code = code;
    this.violations = violations;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

/** Nothing came back at all. */
export class Unreachable extends Error {}

/** One gateway. `key` is sent with each call, unless it is empty. */
export class Gateway {
  key = "";

  async #fetch(path, { headers = {}, ...options } = {}) {
    const authorization = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    let response;
    try {
      response = await fetch(path, {
        cache: "no-store",
        redirect: "error",
        ...options,
        headers: { ...headers, ...authorization },
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Unreachable("the gateway does not answer");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }

  /** Tells how the system is, as /status does: with the scheduler of a model, or else the first one's. */
  async status(model = "") {
    return (await this.#fetch(model ? `status?model=${encodeURIComponent(model)}` : "status")).json();
  }

  /** Loads a model that is loaded on demand; ends when it is loaded. */
  async load(model) {
    const headers = { "Content-Type": "application/json" };
    await this.#fetch("v1/models/load", { method: "POST", headers, body: JSON.stringify({ model }) });
  }

  /** Lists the models. */
  async models(signal) {
    return (await (await this.#fetch("v1/models", { signal })).json()).data;
  }

  /** Ends a request, even when the page is being left. */
  async cancel(requestId) {
    await this.#fetch(`v1/requests/${requestId}`, { method: "DELETE", keepalive: true });
  }

  /** Sends a request under an id, by which it can be read again. */
  begin(path, body, requestId, signal) {
    const headers = { "Content-Type": "application/json", "Idempotency-Key": requestId };
    return this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** Reads a request's answer again, behind an event. */
  resume(requestId, lastEventId, signal) {
    const headers = lastEventId ? { "Last-Event-ID": lastEventId } : {};
    return this.#fetch(`v1/requests/${requestId}/stream`, { headers, signal });
  }
}

async function errorOf(response) {
  const retryAfter = response.headers.get("retry-after");
  const details = { status: response.status, retryAfterSeconds: retryAfter === null ? null : Number(retryAfter) };
  try {
    const { error } = await response.json();
    return new ApiError({ ...details, ...known(error) });
  } catch {
    // A proxy's answer, say.
    return new ApiError({ ...details, code: `HTTP ${response.status}`, message: response.statusText });
  }
}

function known({ message, code, violations }) {
  return { message: String(message), code: String(code ?? ""), violations: violations ?? [] };
}

/** Makes a request id. crypto.randomUUID is not there on plain HTTP. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Streams an answer to its end, over as many connections as that takes.
 *
 * Yields {chunk} for each chunk of the API, {broken: true} when the stream breaks, and {resumed: true} when it goes on.
 * Throws ApiError for what the gateway tells, Unreachable when it does not come back, AbortError on the signal.
 */
export async function* streamAnswer(gateway, path, body, requestId, signal, pause = wait) {
  const response = await gateway.begin(path, body, requestId, signal);
  yield* readToEnd(gateway, response, requestId, signal, pause);
}

/** Streams the answer of a request that was sent before, from its beginning, as `streamAnswer` does. */
export async function* streamAgain(gateway, requestId, signal, pause = wait) {
  const response = await resume(gateway, requestId, "", signal, pause);
  yield* readToEnd(gateway, response, requestId, signal, pause);
}

async function* readToEnd(gateway, response, requestId, signal, pause) {
  const place = { id: "" };
  while (!(yield* readAnswer(response, place, signal))) {
    yield { broken: true };
    response = await resume(gateway, requestId, place.id, signal, pause);
    yield { resumed: true };
  }
}

/** Yields the chunks of one connection; returns whether the answer is complete. */
async function* readAnswer(response, place, signal) {
  try {
    for await (const { id, data } of readEvents(response.body)) {
      if (data === "[DONE]") return true;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        if (GOES_ON.has(chunk.error.code)) return false;
        throw new ApiError(known(chunk.error));
      }
      yield { chunk };
      place.id = id || place.id;
    }
  } catch (error) {
    if (error instanceof ApiError || error instanceof SyntaxError || signal?.aborted) throw error;
  }
  return false;
}

async function resume(gateway, requestId, lastEventId, signal, pause) {
  let delay = FIRST_DELAY_SECONDS;
  for (let waited = 0; ; waited += delay, delay = Math.min(2 * delay, MAX_DELAY_SECONDS)) {
    await pause(delay, signal);
    try {
      return await gateway.resume(requestId, lastEventId, signal);
    } catch (error) {
      const mayPass = error instanceof Unreachable || (error instanceof ApiError && error.status === 503);
      if (!mayPass || waited >= RESUME_SECONDS) throw error;
    }
  }
}

/** Waits for some seconds, or throws AbortError. */
async function wait(seconds, signal) {
  signal?.throwIfAborted();
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, 1000 * seconds);
    signal?.addEventListener("abort", stop, { once: true });
  });
}
