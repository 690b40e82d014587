// Reads Markdown into shapes, block by block: paragraphs, headings, lists, tables, quotes, code. Markup is text here.
// Knows nothing of elements. Takes time in proportion to the text and to MAX_DEPTH, whatever the text is.

import { parseInline } from "./inline.js";

// Quotes and lists within one another; what is deeper is shown as it was written.
const MAX_DEPTH = 10;
const MAX_COLUMNS = 50;
// Lines that are longer draw no rules and begin no tables.
const MAX_RULE = 400;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const UNDERLINE = /^ {0,3}(={3,}|-{3,})[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: |$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TASK = /^\[([ xX])\] /;
// The page itself has the headings above these.
const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"];

/** Reads a text; gives its shapes. */
export function parseMarkdown(text) {
  return parseBlocks(lines(text)).map(({ shape }) => shape);
}

/**
 * Reads a text that grows, and what is new of it only.
 *
 * A block is settled when another one has begun behind it in a line that is complete.
 */
export class GrowingMarkdown {
  #settled = [];
  // Where the first block that is not settled begins, and how far lines were complete when that was found.
  #start = 0;
  #complete = 0;

  /** Takes the whole text so far, which begins as it did before; returns the shapes, and how many will stay. */
  read(text) {
    const complete = text.lastIndexOf("\n") + 1;
    if (complete > this.#complete) this.#settle(text, complete);
    const growing = parseBlocks(lines(text.slice(this.#start)));
    return {
      shapes: [...this.#settled, ...growing.map(({ shape }) => shape)],
      numSettled: this.#settled.length,
    };
  }

  #settle(text, complete) {
    this.#complete = complete;
    const blocks = parseBlocks(lines(text.slice(this.#start, complete)));
    const last = blocks.pop();
    if (!blocks.length) return;
    this.#settled.push(...blocks.map(({ shape }) => shape));
    let start = this.#start;
    for (let line = 0; line < last.start; line++) start = text.indexOf("\n", start) + 1;
    this.#start = start;
  }
}

function lines(text) {
  return text.split("\n").map((line) => (line.startsWith("\t") || line.startsWith(" ") ? untabbed(line) : line));
}

/** Writes the tabs that indent a line as spaces. */
function untabbed(line) {
  const [indent] = /^[ \t]*/.exec(line);
  let width = 0;
  for (const each of indent) width += each === "\t" ? 4 - (width % 4) : 1;
  return " ".repeat(width) + line.slice(indent.length);
}

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

/** Reads lines; gives blocks as {shape, start}, where `start` is the number of the first line. */
function parseBlocks(all, depth = 0) {
  const blocks = [];
  for (let at = 0; at < all.length;) {
    if (isBlank(all[at])) {
      at++;
      continue;
    }
    const { shape, end } = readBlock(all, at, depth);
    blocks.push({ shape, start: at });
    at = end;
  }
  return blocks;
}

function readBlock(all, at, depth) {
  const line = all[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(all, at, fence);
  if (HEADING.test(line)) return { shape: heading(line), end: at + 1 };
  if (isRule(line)) return { shape: { name: "hr", children: [] }, end: at + 1 };
  if (line.startsWith("    ")) return readIndentedCode(all, at);
  if (isTable(all, at)) return readTable(all, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(all, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(all, at, depth);
  return readParagraph(all, at, depth);
}

/** Tells whether a line ends the paragraph before it by what it begins. */
function interrupts(all, at, depth) {
  const line = all[at];
  if (FENCE.test(line) || HEADING.test(line) || isRule(line) || isTable(all, at)) return true;
  if (depth >= MAX_DEPTH) return false;
  const item = ITEM.exec(line);
  // A number at the start of a line is seldom a list.
  const begins = item && !isBlank(line.slice(item[0].length)) && !/^\d/.test(item[2].replace(/^1[.)]/, ""));
  return QUOTE.test(line) || Boolean(begins);
}

function isRule(line) {
  return line.length <= MAX_RULE && RULE.test(line);
}

function heading(line) {
  const [whole, marks] = HEADING.exec(line);
  const text = line
    .slice(whole.length)
    .trim()
    .replace(/(^|[ \t])#+$/, "");
  return { name: HEADINGS[marks.length - 1], children: parseInline(text.trim()) };
}

function readParagraph(all, at, depth) {
  let end = at + 1;
  while (end < all.length && !isBlank(all[end])) {
    const underline = depth < MAX_DEPTH && UNDERLINE.exec(all[end]);
    if (underline) {
      const children = parseInline(all.slice(at, end).join("\n").trim());
      return { shape: { name: HEADINGS[underline[1][0] === "=" ? 0 : 1], children }, end: end + 1 };
    }
    if (interrupts(all, end, depth)) break;
    end++;
  }
  const text = all.slice(at, end).join("\n").trim();
  return { shape: { name: "p", children: parseInline(text) }, end };
}

function code(language, text) {
  const head = [
    { name: "span", children: language ? [language] : [] },
    { name: "button", type: "button", className: "copy", children: ["Copy"] },
  ];
  const label = language ? `Code, ${language}` : "Code";
  const pre = { name: "pre", tabIndex: 0, role: "group", "aria-label": label, children: [] };
  pre.children.push({ name: "code", children: text ? [text] : [] });
  return { name: "div", className: "code", children: [{ name: "div", className: "head", children: head }, pre] };
}

/** A fence that nothing closes goes on to the end. */
function readFence(all, at, [, indent, marks, info]) {
  const closing = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
  const text = [];
  let end = at + 1;
  for (; end < all.length && !closing.test(all[end]); end++) text.push(outdented(all[end], indent.length));
  const language = info
    .trim()
    .split(/[\s{,]/, 1)[0]
    .slice(0, 40);
  return { shape: code(language, text.join("\n")), end: Math.min(all.length, end + 1) };
}

function outdented(line, width) {
  return line.slice(Math.min(width, indentOf(line)));
}

function readIndentedCode(all, at) {
  let end = at;
  while (end < all.length && (isBlank(all[end]) || all[end].startsWith("    "))) end++;
  const text = all.slice(at, end).map((line) => outdented(line, 4));
  return { shape: code("", text.join("\n").trimEnd()), end };
}

function readQuote(all, at, depth) {
  const inner = [];
  let end = at;
  for (; end < all.length; end++) {
    const mark = QUOTE.exec(all[end]);
    const goesOn = !isBlank(all[end]) && inner.length && !isBlank(inner.at(-1)) && !interrupts(all, end, depth);
    if (!mark && !goesOn) break;
    inner.push(all[end].slice(mark ? mark[0].length : 0));
  }
  return { shape: { name: "blockquote", children: shapes(inner, depth + 1) }, end };
}

function shapes(inner, depth) {
  return parseBlocks(inner, depth).map(({ shape }) => shape);
}

/** What kind of list an item is of: its bullet, or what stands behind its number. */
const kindOf = (item) => item[2].at(-1);

function readList(all, at, depth) {
  const first = ITEM.exec(all[at]);
  const items = [];
  let isLoose = false;
  let end = at;
  while (end < all.length) {
    const item = ITEM.exec(all[end]);
    if (!item || kindOf(item) !== kindOf(first) || isRule(all[end])) break;
    const { inner, next } = readItem(all, end, item, depth);
    const sibling = next < all.length && ITEM.exec(all[next]);
    const isLast = !sibling || kindOf(sibling) !== kindOf(first);
    isLoose ||= hasGap(inner, isLast);
    items.push(inner);
    end = next;
  }
  const children = items.map((inner) => listItem(inner, isLoose, depth));
  const number = Number.parseInt(first[2], 10);
  const shape = Number.isNaN(number) ? { name: "ul", children } : { name: "ol", start: number, children };
  return { shape, end };
}

/** Gathers the lines of an item without their indentation. */
function readItem(all, at, item, depth) {
  const [, { length: indent }, marker] = item;
  const rest = all[at].slice(indent + marker.length);
  const gap = isBlank(rest) || indentOf(rest) > 4 ? 1 : indentOf(rest);
  const width = indent + marker.length + gap;
  const inner = [rest.slice(gap)];
  let next = at + 1;
  for (; next < all.length; next++) {
    const line = all[next];
    if (isBlank(line)) {
      inner.push("");
      continue;
    }
    const wasBlank = inner.at(-1) === "";
    const isWithin = indentOf(line) >= width || (indentOf(line) > indent + 1 && ITEM.test(line.trimStart()));
    if (!isWithin && (wasBlank || ITEM.test(line) || interrupts(all, next, depth))) break;
    inner.push(outdented(line, width));
  }
  return { inner, next };
}

/** Tells whether there is a blank line within an item, or behind it unless it is the last one. */
function hasGap(inner, isLast) {
  const text = inner.findLastIndex((line) => line !== "");
  return (!isLast && text < inner.length - 1) || inner.slice(0, text).includes("");
}

function listItem(inner, isLoose, depth) {
  const task = TASK.exec(inner[0]);
  if (task) inner[0] = `${task[1] === " " ? "☐" : "☑"} ${inner[0].slice(task[0].length)}`;
  const children = shapes(inner, depth + 1);
  return {
    name: "li",
    children: isLoose ? children : children.flatMap((shape) => (shape.name === "p" ? shape.children : [shape])),
  };
}

function isTable(all, at) {
  const [line, below] = [all[at], all[at + 1]];
  if (below === undefined || below.length > MAX_RULE || !line.includes("|") || !DELIMITERS.test(below)) return false;
  const num = cells(below).length;
  return num <= MAX_COLUMNS && cells(line).length === num;
}

/** Cuts a row at its bars, but not at those that a backslash stands before. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "");
  const all = [""];
  for (let at = 0; at < row.length; at++) {
    if (row[at] === "\\" && row[at + 1] === "|") all[all.length - 1] += row[++at];
    else if (row[at] === "|") all.push("");
    else all[all.length - 1] += row[at];
  }
  if (all.length > 1 && isBlank(all.at(-1))) all.pop();
  return all.map((cell) => cell.trim());
}

function readTable(all, at) {
  const aligns = cells(all[at + 1]).map(alignOf);
  const row = (name, line) => {
    const texts = cells(line);
    const children = aligns.map((className, index) => ({
      name,
      ...(name === "th" ? { scope: "col" } : {}),
      ...(className ? { className } : {}),
      children: parseInline(texts[index] ?? ""),
    }));
    return { name: "tr", children };
  };
  let end = at + 2;
  const rows = [];
  for (; end < all.length && all[end].includes("|") && !isBlank(all[end]); end++) rows.push(row("td", all[end]));
  const table = [
    { name: "thead", children: [row("th", all[at])] },
    { name: "tbody", children: rows },
  ];
  const scrolled = { name: "div", className: "scrolled", tabIndex: 0, role: "group", "aria-label": "Table" };
  return { shape: { ...scrolled, children: [{ name: "table", children: table }] }, end };
}

function alignOf(cell) {
  if (!cell.endsWith(":")) return "";
  return cell.startsWith(":") ? "centered" : "right";
}
