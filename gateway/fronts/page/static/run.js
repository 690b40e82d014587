// One request, from its start to its end: reads its answer into choices, times it, and says what became of it.
// Knows nothing of elements.

import { newRequestId, streamAgain, streamAnswer } from "./client.js";
import { count, counted, duration, UNKNOWN } from "./format.js";
import { Timing } from "./meter.js";

const ENDS = { stop: "the model ended it", length: "max tokens reached", error: "it failed", tool_calls: "it calls tools" };
const BROKEN = "The connection broke. The answer goes on in the gateway; reading on …";
const CUT_OFF = "The answer ends here: what follows was not received.";

/** A request and its answer. */
export class Run {
  /** What went wrong, or null. */
  error = null;
  /** What a person should know of it now, or nothing. */
  notice = "";
  isRunning = true;
  #gateway;
  #meter;
  #onChange;
  #abort = new AbortController();
  #timing = new Timing(now());
  #endedAt = null;
  #usage = null;
  #numResumes = 0;

  /**
   * `choices` are filled; `meter` gets the latencies; `onChange` is called whenever there is more. `id` names a request
   * that was sent before.
   */
  constructor(gateway, choices, meter, onChange, id = newRequestId()) {
    this.id = id;
    this.#gateway = gateway;
    this.choices = choices;
    this.#meter = meter;
    this.#onChange = onChange;
  }

  /** Ends it, here and in the gateway, which would go on for a while. */
  stop() {
    if (!this.isRunning) return;
    this.#abort.abort();
    this.#gateway.cancel(this.id).catch(() => {});
  }

  /** Sends the request, and reads the answer to its end, which may be an error. Throws nothing. */
  read(path, body) {
    return this.#follow(streamAnswer(this.#gateway, path, body, this.id, this.#abort.signal));
  }

  /** Reads the answer of a request that was sent before, from its beginning. Throws nothing. */
  readAgain() {
    return this.#follow(streamAgain(this.#gateway, this.id, this.#abort.signal));
  }

  async #follow(events) {
    try {
      for await (const event of events) this.#take(event);
      this.notice = "";
    } catch (error) {
      this.#fail(error);
    }
    this.isRunning = false;
    this.#endedAt = now();
  }

  #take({ chunk, broken, resumed }) {
    if (broken || resumed) this.notice = broken ? BROKEN : "";
    if (resumed) this.#numResumes++;
    this.#usage = chunk?.usage ?? this.#usage;
    for (const choice of chunk?.choices ?? []) this.#grow(choice);
    this.#onChange();
  }

  #grow(choice) {
    this.choices[choice.index]?.take(choice);
    const hadFirst = this.#timing.firstToken !== null;
    const each = this.#timing.note(choice.index, choice.token_ids?.length ?? 0, now());
    if (!hadFirst && this.#timing.firstToken !== null) this.#meter.addFirst(this.#timing.firstToken);
    if (each !== null) this.#meter.addNext(each);
  }

  #fail(error) {
    if (error.name === "AbortError") {
      this.notice = "Stopped.";
      return;
    }
    this.error = error;
    this.notice = this.#timing.numTokens ? CUT_OFF : "";
  }

  /** What is known of it, in a few words each. */
  get facts() {
    if (!this.isRunning && this.#timing.firstToken === null) return [];
    const rate = this.#timing.rate(this.#endedAt ?? now());
    return [
      `first token ${duration(this.#timing.firstToken)}`,
      counted(this.#usage?.completion_tokens ?? this.#timing.numTokens, "token"),
      `${rate === null ? UNKNOWN : rate.toFixed(1)} tokens/s`,
      this.#prompt(),
      this.#numResumes ? counted(this.#numResumes, "reconnect") : "",
      this.isRunning ? "" : [...new Set(this.choices.map(ending))].filter(Boolean).join(", "),
    ].filter(Boolean);
  }

  #prompt() {
    if (!this.#usage) return "";
    const cached = this.#usage.prompt_tokens_details?.cached_tokens;
    return counted(this.#usage.prompt_tokens, "prompt token") + (cached ? `, ${count(cached)} of them cached` : "");
  }
}

function ending({ finishReason }) {
  return ENDS[finishReason] ?? finishReason;
}

function now() {
  return performance.now() / 1000;
}
