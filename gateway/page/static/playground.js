// The playground: the form, one answer at a time, and a chat's messages so far.

import { Choice } from "./answer.js";
import { byId, framed, make } from "./elements.js";
import { Meter } from "./meter.js";
import { showProblem } from "./problem.js";
import { asCommand, makeRequest } from "./request.js";
import { Run } from "./run.js";
import { announce, TokenCard, TokenView } from "./tokens.js";

const MAX_CHOICES = 64;

/** The form and the answers below it. */
export class Playground {
  /** What the page saw of latencies. */
  meter = new Meter();
  /** The model that is asked; empty: whichever there is. */
  model = "";
  #gateway;
  #form = byId("form");
  #answers = byId("answers");
  #card = new TokenCard();
  #messages = [];
  #run = null;

  constructor(gateway) {
    this.#gateway = gateway;
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start();
    });
    this.#form.addEventListener("input", () => this.showCommand());
    this.#form.addEventListener("change", ({ target }) => target.name === "mode" && this.#changeMode());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.#run?.stop());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("tint").addEventListener("change", ({ target }) => this.#answers.classList.toggle("tinted", target.checked));
    addEventListener("pagehide", () => this.#run?.stop());
    this.#changeMode();
  }

  get #isChat() {
    return this.#form.elements.mode.value === "chat";
  }

  #request() {
    const fields = Object.fromEntries(new FormData(this.#form));
    const system = fields.system.trim() ? [{ role: "system", content: fields.system }] : [];
    const messages = [...system, ...this.#messages, { role: "user", content: fields.prompt }];
    return makeRequest({ fields, messages, model: this.model });
  }

  /** Shows the command for a shell that sends what the form says. */
  showCommand() {
    const { path, body } = this.#request();
    byId("command").textContent = asCommand(new URL(path, document.baseURI).href, body, this.#gateway.key !== "");
  }

  #changeMode() {
    const mode = this.#form.elements.mode.value;
    byId("prompt-label").textContent = this.#isChat ? "Message" : "Prompt";
    byId("run").textContent = this.#isChat ? "Send" : "Generate";
    for (const element of document.querySelectorAll("[data-only]")) element.hidden = element.dataset.only !== mode;
    // Where one looks for it, and in the same order for those who hear the page.
    if (this.#isChat) byId("prompt-row").before(this.#answers);
    else byId("result").prepend(this.#answers);
    this.#clear();
  }

  #clear() {
    this.#run?.stop();
    this.#run = null;
    this.#messages = [];
    this.#answers.replaceChildren();
    byId("facts").textContent = "";
    byId("notice").textContent = "";
    showProblem(null);
    this.#setRunning(false);
    this.showCommand();
  }

  async #start() {
    if (this.#run?.isRunning) return;
    const { path, body } = this.#request();
    const choices = Array.from({ length: Math.min(MAX_CHOICES, Math.max(1, body.n || 1)) }, () => new Choice());
    const views = this.#place(body, choices);
    const tell = framed(() => this.#run === run && this.#tell(run));
    const run = new Run(this.#gateway, choices, this.meter, () => {
      for (const view of views) view.grow();
      tell();
    });
    this.#run = run;
    showProblem(null);
    this.#setRunning(true);
    announce("Generating");
    await run.read(path, body);
    for (const view of views) view.end();
    // Unless it was left behind, by another mode for one.
    if (this.#run === run) this.#end(run, body);
  }

  /** Makes room for the answer: for each choice of a completion; for what was said in a chat, and the answer to it. */
  #place(body, choices) {
    const views = choices.map((choice) => new TokenView(choice, this.#card));
    if (this.#isChat) {
      const text = make("div", {}, body.messages.at(-1).content);
      this.#answers.append(article("user", text), ...views.map(({ element }) => article("assistant", element)));
      this.#form.elements.prompt.value = "";
    } else {
      this.#answers.replaceChildren(...views.map(({ element }) => article("completion", element)));
    }
    return views;
  }

  #tell(run) {
    byId("facts").textContent = run.facts.join(" · ");
    byId("notice").textContent = run.notice;
  }

  #end(run, body) {
    this.#setRunning(false);
    this.#tell(run);
    showProblem(run.error);
    if (!run.error) announce(`Done: ${run.facts.join(", ")}`);
    if (!this.#isChat) return;
    const [{ text }] = run.choices;
    const asked = body.messages.at(-1);
    if (text) this.#messages.push(asked, { role: "assistant", content: text });
    else this.#takeBack(asked.content);
    this.showCommand();
  }

  /** Gives a message that was not answered back, to be sent again. */
  #takeBack(text) {
    this.#answers.lastElementChild.remove();
    this.#answers.lastElementChild.remove();
    this.#form.elements.prompt.value ||= text;
  }

  #setRunning(is) {
    byId("run").disabled = is;
    byId("stop").disabled = !is;
    this.#form.setAttribute("aria-busy", String(is));
  }
}

function article(role, content) {
  return make("article", { "data-role": role, "aria-label": role }, content);
}
