// An answer as it grows: the text of each choice, cut into its tokens. Knows nothing of how it is shown.

/** One token: its text by itself, its log probability, and the likeliest ones in its place, as {text, logprob}. */
function makeToken(text, logprob, top) {
  return { text, logprob, top };
}

/**
 * One choice. Its text is cut into pieces: a piece is a token, or several where a character is made of several.
 * Without log probabilities all of it is one piece, without tokens.
 */
export class Choice {
  // Code points: offsets count these, and a string's own indices do not.
  #characters = [];
  #text = "";
  #pieces = [];
  // Where the next token of a chat begins, which tells no offsets.
  #offset = 0;
  numTokens = 0;
  finishReason = null;
  /** What the model thought before it spoke. */
  reasoning = "";
  /** Its calls of tools, as the API has them in messages. */
  calls = [];
  stopReason = null;

  /** Takes the choice of a chunk, of either call; returns how many tokens it had. */
  take(choice) {
    const text = choice.text ?? choice.delta?.content ?? "";
    this.#text += text;
    this.reasoning += choice.delta?.reasoning_content ?? "";
    for (const piece of choice.delta?.tool_calls ?? []) this.#addCall(piece);
    for (const character of text) this.#characters.push(character);
    const tokens = choice.logprobs?.content
      ? choice.logprobs.content.map((token) => this.#chatToken(token))
      : completionTokens(choice.logprobs);
    for (const { start, token } of tokens) this.#add(start, token);
    if (text && !this.#pieces.length) this.#pieces.push({ start: 0, tokens: [] });
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.stopReason = choice.stop_reason ?? this.stopReason;
    this.numTokens += tokens.length;
    return tokens.length;
  }

  #addCall({ index, id, function: { name, arguments: more } }) {
    this.calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    this.calls[index].function.arguments += more ?? "";
  }

  #chatToken({ token, logprob, bytes, top_logprobs: top }) {
    const raw = bytes ?? [];
    // A token that goes on with a character belongs to it.
    const start = Math.max(0, this.#offset - (raw.length > 0 && continues(raw[0]) ? 1 : 0));
    this.#offset += raw.filter((byte) => !continues(byte)).length;
    const alternatives = (top ?? []).map((other) => ({ text: other.token, logprob: other.logprob }));
    return { start, token: makeToken(token, logprob, alternatives) };
  }

  #add(start, token) {
    const last = this.#pieces.at(-1);
    if (last?.start === start) last.tokens.push(token);
    else this.#pieces.push({ start, tokens: [token] });
  }

  /** The whole text so far. */
  get text() {
    return this.#text;
  }

  /** How many pieces there are. */
  get length() {
    return this.#pieces.length;
  }

  /** Gives a piece: its text so far, and its tokens. */
  piece(index) {
    const { start, tokens } = this.#pieces[index];
    return { text: this.#characters.slice(start, this.#pieces[index + 1]?.start).join(""), tokens };
  }

  /** Tells whether a piece's text will not change: the next one has begun. Text may come later than its tokens. */
  isSettled(index) {
    return index + 1 < this.#pieces.length && this.#pieces[index + 1].start < this.#characters.length;
  }
}

/** Tells whether a byte of UTF-8 is not the first one of its character. */
function continues(byte) {
  return (byte & 0xc0) === 0x80;
}

function completionTokens(logprobs) {
  if (!logprobs) return [];
  const { tokens, token_logprobs: chosen, top_logprobs: tops, text_offset: starts } = logprobs;
  return tokens.map((text, index) => {
    const top = Object.entries(tops?.[index] ?? {}).map(([other, logprob]) => ({ text: other, logprob }));
    return { start: starts[index], token: makeToken(text, chosen[index], top) };
  });
}

/** Gives the alternatives of a token with itself among them, the likeliest first. */
export function ranked(token) {
  const others = token.top.filter((other) => other.text !== token.text);
  const all = [{ text: token.text, logprob: token.logprob, isChosen: true }, ...others];
  return all.sort((first, second) => second.logprob - first.logprob);
}

const MARKS = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣" };

/** Makes what cannot be seen of a token visible. */
export function visible(text) {
  return text === "" ? "∅" : text.replace(/^[ ]+|[ ]+$|[\n\t\r]/g, (found) => [...found].map((c) => MARKS[c]).join(""));
}
