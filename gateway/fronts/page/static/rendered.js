// Shows a choice as Markdown, and follows it as it grows: touches only the elements that change. What it makes are
// elements of a few kinds, with text in them; markup in an answer is text, and links lead to http and https only.

import { framed, make } from "./elements.js";
import { safeAddress } from "./inline.js";
import { GrowingMarkdown } from "./markdown.js";

const NAMES = new Set(
  (
    "a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong " + "table tbody td th thead tr ul"
  ).split(" "),
);

/** One choice on the page. It needs a `text`, which only grows. */
export class RenderedView {
  #choice;
  #markdown = new GrowingMarkdown();
  #shown = [];

  constructor(choice) {
    this.#choice = choice;
    this.element = make("div", { className: "rendered growing" });
  }

  /** Takes note that there is more, which it shows with the next frame. */
  grow = framed(() => this.show());

  /** Shows all that there is at once, since no more will come: a frame may be long in coming. */
  end() {
    this.element.classList.remove("growing");
    this.show();
  }

  /** Shows all that there is. */
  show() {
    const { shapes } = this.#markdown.read(this.#choice.text);
    change(this.element, this.#shown, shapes);
    this.#shown = shapes;
  }
}

/** Makes an element's children be those of the shapes given, where there were others before. Settled ones are the same. */
function change(element, before, shapes) {
  for (let index = 0; index < shapes.length; index++) {
    const [was, shape] = [before[index], shapes[index]];
    if (was === shape) continue;
    const node = element.childNodes[index];
    if (was === undefined) element.append(build(shape));
    else if (typeof was === "string" && typeof shape === "string") rewrite(node, was, shape);
    else if (isAlike(was, shape)) change(node, was.children, shape.children);
    else node.replaceWith(build(shape));
  }
  while (element.childNodes.length > shapes.length) element.lastChild.remove();
}

function rewrite(node, was, text) {
  if (text.startsWith(was)) node.appendData(text.slice(was.length));
  else node.data = text;
}

/** Tells whether one element can stand for both, but for its children. */
function isAlike(was, shape) {
  if (typeof was === "string" || typeof shape === "string") return false;
  const names = new Set([...Object.keys(was), ...Object.keys(shape)]);
  names.delete("children");
  return [...names].every((name) => was[name] === shape[name]);
}

function build(shape) {
  if (typeof shape === "string") return document.createTextNode(shape);
  const { name, children, ...properties } = shape;
  const built = children.map(build);
  if (!NAMES.has(name)) return make("span", {}, ...built);
  if (name !== "a") return make(name, properties, ...built);
  const href = safeAddress(properties.href);
  const elsewhere = { href, target: "_blank", rel: "noopener noreferrer" };
  return href === null ? make("span", {}, ...built) : make("a", elsewhere, ...built);
}
