// The playground: the form, the answers to a prompt or the conversation, and the one request that runs.

import { Choice } from "./answer.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { byId, framed, make } from "./elements.js";
import { Meter } from "./meter.js";
import { showProblem } from "./problem.js";
import { asCommand, makeRequest } from "./request.js";
import { Run } from "./run.js";
import { browserStore, tabStore } from "./store.js";
import { announce, TokenCard, TokenView } from "./tokens.js";

const MAX_CHOICES = 64;
// So much of an answer is read aloud when it is complete.
const MAX_SPOKEN = 1000;
const MODE = "mode";
// The request of this tab whose answer a reload reads on with.
const RUNNING = "running";
const KEPT_FIELDS = "fields";
// What the form's fields hold at first, by mode. What is not named is empty.
const FIELDS = {
  completion: { prompt: "def read_lines(path):\n", temperature: "0.7", max_tokens: "96", logprobs: "5" },
  chat: { temperature: "0.7", logprobs: "5" },
};
// What stands in the form, in this order, for those who hear the page as for those who see it.
const PARTS = {
  completion: ["composer", "problem", "answers", "status", "command-box"],
  chat: ["settings", "conversation-box", "problem", "status", "composer"],
};

/** The form and what is answered. */
export class Playground {
  /** What the page saw of latencies. */
  meter = new Meter();
  #gateway;
  #model = "";
  #form = byId("form");
  #answers = byId("answers");
  #card = new TokenCard();
  #kept = browserStore();
  #ofTab = tabStore();
  #chat = new Chat(new Conversation(this.#kept), this.#card);
  #mode = null;
  // Whether somebody has begun to fill the form in.
  #isTouched = false;
  #fields = { ...FIELDS, ...JSON.parse(this.#ofTab.get(KEPT_FIELDS) ?? "{}") };
  #draft = null;
  #run = null;

  constructor(gateway) {
    this.#gateway = gateway;
    this.#listen();
    const running = this.#ofTab.get(RUNNING);
    this.#setMode(running ? "chat" : (this.#kept.get(MODE) ?? this.#ofTab.get(MODE) ?? "completion"));
    if (running) this.#readOn(running);
  }

  /** Takes note of the model that is asked; without one, whichever there is. */
  setModel(model) {
    this.#model = model?.id ?? "";
    // What most people want of a model that can chat, unless they have said what they want.
    if (model?.has_chat_template && !this.#kept.get(MODE) && this.#isUntouched) this.#setMode("chat");
    this.showCommand();
  }

  /** Shows the command for a shell that sends what the form says. */
  showCommand() {
    const { path, body } = this.#request([...this.#chat.messages, { role: "user", content: this.#prompt.value }]);
    byId("command").textContent = asCommand(new URL(path, document.baseURI).href, body, this.#gateway.key !== "");
  }

  get #isChat() {
    return this.#mode === "chat";
  }

  get #prompt() {
    return byId("prompt");
  }

  get #isUntouched() {
    return !this.#isTouched && this.#prompt.value === FIELDS[this.#mode].prompt;
  }

  #listen() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    for (const type of ["focusin", "pointerdown"])
      this.#form.addEventListener(type, () => (this.#isTouched = true), { once: true });
    this.#form.addEventListener("input", () => this.showCommand());
    for (const radio of this.#form.elements.mode)
      radio.addEventListener("change", () => this.#chooseMode(this.#form.elements.mode.value));
    this.#prompt.addEventListener("keydown", (event) => this.#press(event));
    byId("stop").addEventListener("click", () => this.#run?.stop());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("tint").addEventListener("change", ({ target }) => this.#answers.classList.toggle("tinted", target.checked));
    byId("tokens").addEventListener("change", ({ target }) => {
      byId("conversation").classList.toggle("by-token", target.checked);
    });
    this.#chat.onAgain = () => {
      if (this.#run?.isRunning) return;
      this.#chat.askAgain();
      this.#answerChat();
    };
    this.#chat.onEdit = (text) => this.#edit(text);
    this.#kept.onChange("chat", () => this.#run?.isRunning || this.#chat.load());
    addEventListener("pagehide", () => this.#leave());
    document.addEventListener("visibilitychange", () => {
      if (document.hidden && this.#isChat && this.#run?.isRunning) this.#chat.keep();
    });
  }

  /** Enter sends a message; a prompt, which may have many lines, it does with Ctrl. */
  #press(event) {
    // Enter also ends the writing of a character.
    if (event.isComposing) return;
    if (event.key === "Escape" && this.#isChat) this.#chat.stopEditing();
    const sends = event.ctrlKey || event.metaKey || (this.#isChat && !event.shiftKey);
    if (event.key !== "Enter" || !sends) return;
    event.preventDefault();
    this.#form.requestSubmit();
  }

  /** Lets a message be changed where messages are written; an empty one: no more. What was there comes back. */
  #edit(text) {
    if (text) this.#draft ??= this.#prompt.value;
    this.#prompt.value = text || this.#draft;
    if (!text) this.#draft = null;
    this.#prompt.focus();
    this.showCommand();
  }

  #request(messages) {
    const fields = Object.fromEntries(new FormData(this.#form));
    const system = fields.system.trim() ? [{ role: "system", content: fields.system }] : [];
    return makeRequest({ fields, messages: [...system, ...messages], model: this.#model });
  }

  #chooseMode(mode) {
    this.#kept.set(MODE, mode);
    this.#setMode(mode);
    this.#form.querySelector(`[name=mode][value=${mode}]`).focus();
  }

  #setMode(mode) {
    this.#run?.stop();
    if (this.#mode) this.#noteFields();
    this.#mode = mode in PARTS ? mode : "completion";
    for (const field of this.#form.querySelectorAll("[name]:not([name=mode], [type=checkbox])"))
      field.value = this.#fields[this.#mode][field.name] ?? "";
    this.#form.elements.mode.value = this.#mode;
    this.#arrange();
    byId("facts").textContent = "";
    byId("notice").textContent = "";
    showProblem(null);
    this.showCommand();
  }

  #noteFields() {
    this.#fields[this.#mode] = Object.fromEntries(new FormData(this.#form));
  }

  /** Keeps what a reload of this tab is to find again. A chat's answer goes on, to be read then. */
  #leave() {
    this.#noteFields();
    this.#ofTab.set(KEPT_FIELDS, JSON.stringify(this.#fields));
    this.#ofTab.set(MODE, this.#mode);
    if (this.#isChat) this.#chat.keep();
    else this.#run?.stop();
  }

  #arrange() {
    const [mode, isChat] = [this.#mode, this.#isChat];
    byId("playground").dataset.mode = mode;
    for (const element of document.querySelectorAll("[data-only]")) element.hidden = element.dataset.only !== mode;
    this.#form.append(...PARTS[mode].map(byId));
    if (isChat) byId("settings").append(byId("command-box"));
    else byId("actions").before(byId("settings"));
    byId("settings").open = !isChat;
    byId("prompt-label").textContent = isChat ? "Message" : "Prompt";
    byId("prompt-label").classList.toggle("unseen", isChat);
    this.#prompt.rows = isChat ? 1 : 4;
    this.#prompt.placeholder = isChat ? "Message" : "";
    byId("run").textContent = isChat ? "Send" : "Generate";
    byId("clear").textContent = isChat ? "New chat" : "Clear";
  }

  #clear() {
    this.#run?.stop();
    this.#run = null;
    if (this.#isChat) this.#chat.clear();
    else this.#answers.replaceChildren();
    this.#ofTab.set(RUNNING, "");
    byId("facts").textContent = "";
    byId("notice").textContent = "";
    showProblem(null);
    this.#setRunning(false);
    this.showCommand();
    if (this.#isChat) this.#prompt.focus();
  }

  #send() {
    if (this.#run?.isRunning) return;
    if (!this.#isChat) this.#complete();
    else if (this.#prompt.value.trim()) {
      const text = this.#prompt.value;
      this.#prompt.value = "";
      this.#chat.ask(text);
      this.#answerChat();
    }
  }

  async #complete() {
    const { path, body } = this.#request([]);
    const choices = Array.from({ length: Math.min(MAX_CHOICES, Math.max(1, body.n || 1)) }, () => new Choice());
    const views = choices.map((choice) => new TokenView(choice, this.#card));
    const articles = views.map(({ element }) => make("article", { "aria-label": "Completion" }, element));
    this.#answers.replaceChildren(...articles);
    await this.#follow(this.#makeRun(choices, views), views, (run) => run.read(path, body));
  }

  async #answerChat() {
    const { path, body } = this.#request(this.#chat.messages);
    await this.#converse(Boolean(body.logprobs), undefined, (run) => run.read(path, body));
  }

  /** Reads the answer that was being read when the page was left. */
  async #readOn(id) {
    this.#chat.askAgain();
    await this.#converse(true, id, (run) => run.readAgain());
  }

  async #converse(hasTokens, id, read) {
    const choice = new Choice();
    const views = this.#chat.begin(choice, hasTokens);
    const run = this.#makeRun([choice], views, id);
    this.#ofTab.set(RUNNING, run.id);
    await this.#follow(run, views, read);
    // Unless it was left behind by a new chat.
    if (this.#run !== run) return;
    const asked = this.#chat.end(choice.finishReason !== null && choice.finishReason !== "error");
    this.#ofTab.set(RUNNING, "");
    this.#prompt.value ||= asked;
    if (!run.error && choice.text) announce(`Answer: ${choice.text.slice(0, MAX_SPOKEN)}`);
    this.showCommand();
  }

  #makeRun(choices, views, id) {
    const show = framed(() => this.#run === run && this.#show(run));
    const onChange = () => {
      for (const view of views) view.grow();
      show();
    };
    const run = new Run(this.#gateway, choices, this.meter, onChange, id);
    return run;
  }

  async #follow(run, views, read) {
    this.#run = run;
    showProblem(null);
    this.#setRunning(true);
    announce("Generating");
    const mode = this.#mode;
    await read(run);
    for (const view of views) view.end();
    // Unless it was left behind.
    if (this.#run !== run) return;
    this.#setRunning(false);
    if (this.#mode !== mode) return;
    this.#show(run);
    showProblem(run.error);
    if (!run.error) announce(`Done: ${run.facts.join(", ")}`);
  }

  #show(run) {
    byId("facts").textContent = run.facts.join(" · ");
    byId("notice").textContent = run.notice;
  }

  #setRunning(is) {
    byId("run").disabled = is;
    byId("stop").disabled = !is;
    this.#form.setAttribute("aria-busy", String(is));
  }
}
