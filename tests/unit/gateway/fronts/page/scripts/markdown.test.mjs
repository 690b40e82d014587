import assert from "node:assert/strict";
import test from "node:test";

import { parseInline, safeAddress } from "../../../../../../gateway/fronts/page/static/inline.js";
import { GrowingMarkdown, parseMarkdown } from "../../../../../../gateway/fronts/page/static/markdown.js";

const NAMES =
  "a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul";

/** Writes shapes as markup is written, for those who read the test. Code blocks are <pre>. */
function written(shape) {
  if (typeof shape === "string") return shape;
  const { name, children, href, start, className } = shape;
  const inner = children.map(written).join("");
  if (className === "code") return `<pre ${written(children[0].children[0])}>${textOf(children[1])}</pre>`;
  if (className === "scrolled") return inner;
  const properties = [href, start, className].filter((each) => each !== undefined).map((each) => ` ${each}`);
  return `<${name}${properties.join("")}>${["br", "hr"].includes(name) ? "" : `${inner}</${name}>`}`;
}

const blocks = (text) => parseMarkdown(text).map(written).join("").replaceAll("<span></span>", "");
const inline = (text) => parseInline(text).map(written).join("");
const textOf = (shape) => (typeof shape === "string" ? shape : shape.children.map(textOf).join(""));
const depthOf = (shape) => (typeof shape === "string" ? 0 : 1 + Math.max(0, ...shape.children.map(depthOf)));
const all = (shape) => (typeof shape === "string" ? [] : [shape, ...shape.children.flatMap(all)]);

const DOCUMENT = `# One *two*

Some **bold _and_ it** with \`code\` and [l](https://x.y/a_b_(c) "t") <b>no</b> max_num_seqs https://a.b/c.
next
- a
  - b
    - c

      second
- d

3. x
   \`\`\`py
   a = 1

   \`\`\`
4. y

| a | b |
|---|:-:|
| 1 | \\| 2 |
text
> q
lazy
>
> - r

***

    code
      more

Title
=====
#hash ***both*** ~~gone~~ \`unclosed

~~~~js x
let\n~~~
\`\`\`
`;

test("emphasis, code and line breaks", () => {
  const cases = {
    "**a** *b* __c__ _d_ ~~e~~": "<strong>a</strong> <em>b</em> <strong>c</strong> <em>d</em> <del>e</del>",
    "***a*** **b *c* d**": "<em><strong>a</strong></em> <strong>b <em>c</em> d</strong>",
    "2 * 3 * 4 snake_case_name ** a **": "2 * 3 * 4 snake_case_name ** a **",
    "`a *b*` ``c ` d`` `open": "<code>a *b*</code> <code>c ` d</code> `open",
    "one\ntwo  \nthree<br>four": "one<br>two<br>three<br>four",
    "\\*a\\* \\(x_1\\) \\[y\\] &lt;b&gt; &#33; &nope;": "*a* \\(x_1\\) \\[y\\] <b> ! &nope;",
    "**grüße** 🙂*a*🙂": "<strong>grüße</strong> 🙂<em>a</em>🙂",
  };
  for (const [text, expected] of Object.entries(cases)) assert.equal(inline(text), expected, text);
});

test("links lead to http and https only", () => {
  const cases = {
    "[a](https://b.c/d_e)": "<a https://b.c/d_e>a</a>",
    '[*a*](<http://b.c/d e> "title")': "<a http://b.c/d%20e><em>a</em></a>",
    "<https://b.c> https://b.c/(d). (https://b.c)":
      "<a https://b.c/>https://b.c</a> <a https://b.c/(d)>https://b.c/(d)</a>. (<a https://b.c/>https://b.c</a>)",
    "![picture](https://b.c/d.png)": "<a https://b.c/d.png>picture</a>",
    "[https://b.c](https://d.e)": "<a https://d.e/>https://b.c</a>",
    "[a](javascript:alert(1)) [b](data:x) [c](/d) [e] [f](": "[a](javascript:alert(1)) [b](data:x) [c](/d) [e] [f](",
    "[a](\u0001javascript:x) [b](JaVaScRiPt:x)": "[a](\u0001javascript:x) [b](JaVaScRiPt:x)",
  };
  for (const [text, expected] of Object.entries(cases)) assert.equal(inline(text), expected, text);
  assert.equal(safeAddress("vbscript:x"), null);
  assert.equal(safeAddress(" javascript:x"), null);
});

test("blocks", () => {
  const cases = {
    "# a\n### b #\n####### c": "<h3>a</h3><h5>b</h5><p>####### c</p>",
    "a\n===\nb\n---\n---": "<h3>a</h3><h4>b</h4><hr>",
    "- a\n- b\n\ntext": "<ul><li>a</li><li>b</li></ul><p>text</p>",
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n  - b\n2. c": "<ol 1><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "7) a\n* b\n+ c": "<ol 7><li>a</li></ol><ul><li>b</li></ul><ul><li>c</li></ul>",
    "- [ ] a\n- [x] b": "<ul><li>☐ a</li><li>☑ b</li></ul>",
    "in\n2024. no list\n- a list": "<p>in<br>2024. no list</p><ul><li>a list</li></ul>",
    "> a\nb\n> > c": "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote>",
    "```py\na  <b>\n```": "<pre <span>py</span>>a  <b></pre>",
    "```\nopen\n\n# no": "<pre >open\n\n# no</pre>",
    "    a\n      b\n\n    c\nd": "<pre >a\n  b\n\nc</pre><p>d</p>",
    "\tone": "<pre >one</pre>",
    "|a|b|\n|-|-:|\n|`1`|2|3|\n|4|":
      "<table><thead><tr><th>a</th><th right>b</th></tr></thead><tbody>" +
      "<tr><td><code>1</code></td><td right>2</td></tr><tr><td>4</td><td right></td></tr></tbody></table>",
    "a | b\nno table": "<p>a | b<br>no table</p>",
    "<div>\n<script>x</script>": "<p><div><br><script>x</script></p>",
    "": "",
    "\n \n": "",
  };
  for (const [text, expected] of Object.entries(cases)) assert.equal(blocks(text), expected, text);
});

test("a text that grows is read as the same text at once, however it is cut", () => {
  let seed = 1;
  const random = (limit) => (seed = (seed * 48271) % 2147483647) % limit;
  for (let round = 0; round < 60; round++) {
    const growing = new GrowingMarkdown();
    for (let end = 0; end < DOCUMENT.length;) {
      end = Math.min(DOCUMENT.length, end + 1 + random(9));
      const text = DOCUMENT.slice(0, end);
      assert.deepEqual(growing.read(text).shapes, parseMarkdown(text), JSON.stringify(text.slice(-40)));
    }
  }
});

test("what is settled is not read again", () => {
  const growing = new GrowingMarkdown();
  const before = growing.read("# a\n\ntext\n\n- b");
  assert.equal(before.numSettled, 1);
  const after = growing.read("# a\n\ntext\n\n- b\n- c\n\nd\n");
  assert.equal(after.numSettled, 3);
  assert.equal(after.shapes[0], before.shapes[0]);
});

// Each of these took minutes if reading it took the square of its length.
const LENGTH = 100_000;
const times = (text) => text.repeat(LENGTH / text.length);
const HOSTILE = {
  "a line": times("a"),
  stars: times("*"),
  "open stars": times("*a "),
  "many emphases": times("*a* "),
  "nested marks": times("***a**b*"),
  "mixed marks": times("*_~~[`"),
  brackets: times("["),
  "open links": times("[a]("),
  "links with long addresses": times(`[a](${"x".repeat(1990)}`),
  "links with titles": times('[a](b "'),
  parentheses: `[a](${times("(")}`,
  images: times("!["),
  backticks: Array.from({ length: 440 }, (_, index) => "`".repeat(index)).join(" "),
  addresses: times("https://"),
  angles: times("<https://"),
  ampersands: times("&"),
  backslashes: times("\\"),
  quotes: times(">"),
  "quoted lines": `${"> ".repeat(50)}\n`.repeat(LENGTH / 100),
  "lists in lists": Array.from({ length: 440 }, (_, index) => `${" ".repeat(2 * index)}- a`).join("\n"),
  bullets: times("- "),
  spaces: `# ${times(" ")}x`,
  hashes: times("#"),
  "a rule that is none": `${times("- ")}x`,
  "a wide table": `${times("|")}\n${"|-".repeat(190)}`,
  "a long table": `|a|\n|-|\n${times("|a|\n")}`,
  fences: times("```\n"),
  headings: times("a\n---\n"),
  newlines: times("\n"),
};

test("no text takes long, nests deeply, or becomes anything but a few kinds of elements", () => {
  const names = new Set(NAMES.split(" "));
  for (const [name, text] of Object.entries(HOSTILE)) {
    for (const shape of parseMarkdown(text)) {
      assert.ok(depthOf(shape) < 100, name);
      for (const each of all(shape)) {
        assert.ok(names.has(each.name), each.name);
        assert.ok(each.name === "a" ? /^https?:/.test(each.href) : each.href === undefined, name);
      }
    }
  }
});

test("a long answer in small pieces does not take the square of its length", () => {
  const text = "A paragraph of *some* words, then another one.\n\n".repeat(4000);
  const growing = new GrowingMarkdown();
  for (let end = 0; end < text.length; end += 40) growing.read(text.slice(0, end));
  assert.ok(growing.read(text).numSettled >= 3998);
});
