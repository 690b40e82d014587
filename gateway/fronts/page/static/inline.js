// Reads Markdown within a paragraph: emphasis, code, links. Gives shapes, which are data and never markup. Knows
// nothing of blocks and of elements. Takes time in proportion to the text, whatever the text is.
//
// A shape is a string, or {name, children} and properties of the element that is to show it.

// As many things may be open at once; what is older stays as it was written. It bounds how deep shapes nest.
const MAX_OPEN = 32;
const MAX_RUN = 3;
const SPECIAL = /[\\`<![\]*_~\n&]|https?:\/\//g;
const AUTOLINK = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BREAK = /<br {0,3}\/?>/iy;
const BARE = /https?:\/\/[^\s<>[\]"`]{1,2000}/y;
const DESTINATION =
  /\([ \n]{0,9}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200}){0,9}))(?:\s{1,9}(?:"[^"]{0,999}"|'[^']{0,999}'))?\s{0,9}\)/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp|hellip|ndash|mdash|times));/y;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  hellip: "…",
  ndash: "–",
  mdash: "—",
  times: "×",
};
const ASCII_PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const WORD = /[\p{L}\p{N}]/u;
const SURROGATE = [0xd800, 0xdfff];

/** Gives an address to which a link may lead, or null: http and https ones, written out. */
export function safeAddress(text) {
  try {
    const { protocol, href } = new URL(text);
    return protocol === "https:" || protocol === "http:" ? href : null;
  } catch {
    return null;
  }
}

/** Reads a text; gives what it is made of. */
export function parseInline(text) {
  return new Inline(text).read();
}

class Inline {
  #text;
  #at = 0;
  #nodes = [];
  // What may be closed yet: {mark, index of its text among the nodes, count, both}.
  #open = [];
  #ticks = null;

  constructor(text) {
    this.#text = text;
  }

  read() {
    const text = this.#text;
    while (this.#at < text.length) {
      SPECIAL.lastIndex = this.#at;
      const found = SPECIAL.exec(text);
      const end = found ? found.index : text.length;
      if (end > this.#at) this.#nodes.push(text.slice(this.#at, end));
      this.#at = end;
      if (found) this.#special(found[0]);
    }
    return merged(this.#nodes);
  }

  #special(mark) {
    if (mark === "\\") this.#escape();
    else if (mark === "`") this.#code();
    else if (mark === "<") this.#angle();
    else if (mark === "&") this.#entity();
    else if (mark === "\n") this.#newline();
    else if (mark === "[" || mark === "!") this.#bracket(mark);
    else if (mark === "]") this.#close();
    else if (mark.startsWith("http")) this.#bare(mark);
    else this.#emphasis(mark);
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    return pattern.exec(this.#text);
  }

  #take(length, ...nodes) {
    this.#at += length;
    this.#nodes.push(...nodes);
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    // Formulas begin so, and are shown as they were written.
    if (next !== "" && "()[]".includes(next)) this.#take(2, `\\${next}`);
    else if (ASCII_PUNCTUATION.test(next)) this.#take(2, next);
    else this.#take(1, next === "\n" ? "" : "\\");
  }

  #code() {
    const length = runLength(this.#text, this.#at);
    const end = this.#closingTicks(length, this.#at + length);
    if (end === null) {
      this.#take(length, "`".repeat(length));
      return;
    }
    let code = this.#text.slice(this.#at + length, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.#take(end + length - this.#at, { name: "code", children: [code] });
  }

  /** Finds where a run of so many backticks begins, at or behind a place. All runs are looked for once. */
  #closingTicks(length, from) {
    this.#ticks ??= ticksByLength(this.#text);
    const places = this.#ticks.get(length);
    // Asked for growing places only.
    while (places.next < places.length && places[places.next] < from) places.next++;
    return places[places.next] ?? null;
  }

  #angle() {
    const link = this.#match(AUTOLINK);
    const address = link && safeAddress(link[1]);
    const newline = this.#match(BREAK);
    if (address) this.#take(link[0].length, anchor(address, [link[1]]));
    else if (newline) this.#take(newline[0].length, { name: "br", children: [] });
    else this.#take(1, "<");
  }

  #entity() {
    const found = this.#match(ENTITY);
    if (!found) {
      this.#take(1, "&");
      return;
    }
    const [whole, decimal, hexadecimal, name] = found;
    this.#take(whole.length, name ? ENTITIES[name] : character(decimal ? Number(decimal) : parseInt(hexadecimal, 16)));
  }

  /** Breaks the line where the text does, as its writer saw it. */
  #newline() {
    const before = this.#nodes.at(-1);
    if (typeof before === "string") this.#nodes[this.#nodes.length - 1] = before.trimEnd();
    let length = 1;
    while (this.#text[this.#at + length] === " ") length++;
    this.#take(length, { name: "br", children: [] });
  }

  #bracket(mark) {
    const isImage = mark === "!";
    if (isImage && this.#text[this.#at + 1] !== "[") {
      this.#take(1, "!");
      return;
    }
    const written = isImage ? "![" : "[";
    this.#push({ mark: "[", index: this.#nodes.length });
    this.#take(written.length, written);
  }

  /** Makes a link of what stands between brackets, an image too, since nothing is loaded from elsewhere. */
  #close() {
    const place = this.#open.findLastIndex(({ mark }) => mark === "[");
    const opener = this.#open[place];
    this.#open.length = Math.max(0, place);
    this.#at++;
    const found = opener && this.#match(DESTINATION);
    const address = found && safeAddress(unescaped(found[1] ?? found[2]));
    if (!address) {
      this.#nodes.push("]");
      return;
    }
    const label = this.#nodes.splice(opener.index).slice(1);
    const children = unlinked(merged(label));
    // Links hold no links.
    this.#open = this.#open.filter(({ mark }) => mark !== "[");
    this.#take(found[0].length, anchor(address, children.length ? children : [address]));
  }

  #bare(mark) {
    const found = WORD.test(this.#text[this.#at - 1] ?? "") ? null : this.#match(BARE);
    const written = found && trimmed(found[0]);
    const address = written && safeAddress(written);
    if (address) this.#take(written.length, anchor(address, [written]));
    else this.#take(mark.length, mark);
  }

  /** Emphasis as CommonMark has it: what a run of marks may close and open hangs on what stands beside it. */
  #emphasis(mark) {
    let count = runLength(this.#text, this.#at);
    const { canOpen, canClose } = this.#flanks(mark, count);
    this.#at += count;
    const fits = mark === "~" ? count === 2 : count <= MAX_RUN;
    const both = canOpen && canClose;
    while (fits && canClose && count > 0) {
      const used = this.#wrap(mark, count, both);
      if (!used) break;
      count -= used;
    }
    if (!count) return;
    if (fits && canOpen) this.#push({ mark, index: this.#nodes.length, count, both });
    this.#nodes.push(mark.repeat(count));
  }

  #flanks(mark, count) {
    const before = characterBefore(this.#text, this.#at);
    const after = String.fromCodePoint(this.#text.codePointAt(this.#at + count) ?? 0x20);
    const [isSpaceBefore, isSpaceAfter] = [SPACE.test(before), SPACE.test(after)];
    const [isMarkBefore, isMarkAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !isSpaceAfter && (!isMarkAfter || isSpaceBefore || isMarkBefore);
    const right = !isSpaceBefore && (!isMarkBefore || isSpaceAfter || isMarkAfter);
    // Names such as max_num_seqs are no emphasis.
    if (mark === "_") return { canOpen: left && (!right || isMarkBefore), canClose: right && (!left || isMarkAfter) };
    return { canOpen: left, canClose: right };
  }

  /** Closes the last run that may be closed by this one; returns how many marks that took. */
  #wrap(mark, count, both) {
    const matches = (opener) =>
      opener.mark === mark &&
      !((both || opener.both) && (opener.count + count) % 3 === 0 && (opener.count % 3 || count % 3));
    const place = this.#open.findLastIndex(matches);
    if (place < 0) return 0;
    const opener = this.#open[place];
    const used = opener.count >= 2 && count >= 2 ? 2 : 1;
    const children = merged(this.#nodes.splice(opener.index + 1));
    opener.count -= used;
    this.#open.length = opener.count ? place + 1 : place;
    if (opener.count) this.#nodes[opener.index] = mark.repeat(opener.count);
    else this.#nodes.pop();
    this.#nodes.push({ name: mark === "~" ? "del" : used === 2 ? "strong" : "em", children });
    return used;
  }

  #push(opener) {
    if (this.#open.length === MAX_OPEN) this.#open.shift();
    this.#open.push(opener);
  }
}

function anchor(href, children) {
  return { name: "a", href, children };
}

function runLength(text, start) {
  let end = start + 1;
  while (text[end] === text[start]) end++;
  return end - start;
}

function ticksByLength(text) {
  const all = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!all.has(run.length)) all.set(run.length, Object.assign([], { next: 0 }));
    all.get(run.length).push(index);
  }
  return all;
}

function characterBefore(text, at) {
  const isPair = at > 1 && text.charCodeAt(at - 1) >= 0xdc00 && text.charCodeAt(at - 1) <= 0xdfff;
  return at === 0 ? " " : text.slice(at - (isPair ? 2 : 1), at);
}

function character(code) {
  const isOne = code > 0 && code <= 0x10ffff && !(code >= SURROGATE[0] && code <= SURROGATE[1]);
  return isOne ? String.fromCodePoint(code) : "\ufffd";
}

function unescaped(text) {
  return text.replace(/\\([!-/:-@[-`{-~])/g, "$1");
}

/** Leaves off what ends the sentence rather than the address. */
function trimmed(address) {
  let end = address.length;
  let surplus = (address.match(/\)/g)?.length ?? 0) - (address.match(/\(/g)?.length ?? 0);
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && surplus > 0) surplus--;
    else if (!".,:;!?'*_~".includes(last)) break;
  }
  return address.slice(0, end);
}

/** Joins texts that stand side by side, so that one that grows is one that grows. */
function merged(nodes) {
  const all = [];
  for (const node of nodes) {
    if (node === "") continue;
    if (typeof node === "string" && typeof all.at(-1) === "string") all[all.length - 1] += node;
    else all.push(node);
  }
  return all;
}

function unlinked(nodes) {
  return nodes.flatMap((node) => {
    if (typeof node === "string") return [node];
    const children = unlinked(node.children);
    return node.name === "a" ? children : [{ ...node, children }];
  });
}
