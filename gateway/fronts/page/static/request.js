// Makes requests of what the form says, and the same as a command for a shell. Knows nothing of elements.

// What each field is called in the API, and how its text is read. An empty one is left to the server.
const PARAMETERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];

/**
 * Makes a request: its path, relative to the page, and its body.
 *
 * `fields` are the form's texts by name, `messages` a chat's so far; `model` may be empty.
 */
export function makeRequest({ fields, messages, model }) {
  const isChat = fields.mode === "chat";
  const body = {
    ...(model ? { model } : {}),
    ...(isChat ? { messages } : { prompt: fields.prompt }),
    ...numbers(fields, isChat ? PARAMETERS : [...PARAMETERS, "n"]),
    ...(isChat && !fields.tokens ? {} : logprobs(fields.logprobs, isChat)),
    ...form(fields.schema),
    ...(isChat ? tools(fields.tools) : {}),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
  };
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

function numbers(fields, names) {
  const given = names.filter((name) => (fields[name] ?? "").trim() !== "");
  return Object.fromEntries(given.map((name) => [name, parse(fields[name])]));
}

/** Reads a number; what is none goes to the server as it is, whose answer says what is wrong with it. */
function parse(text) {
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function logprobs(text, isChat) {
  if ((text ?? "").trim() === "") return {};
  return isChat ? { logprobs: true, top_logprobs: parse(text) } : { logprobs: parse(text) };
}

/** Has the answer be JSON that a schema allows. What cannot be read goes as it is, too. */
function form(text) {
  if (!(text ?? "").trim()) return {};
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parseJson(text) } } };
}

/** Offers functions: {name, parameters} each, or as the API has them. */
function tools(text) {
  if (!(text ?? "").trim()) return {};
  const listed = parseJson(text);
  if (!Array.isArray(listed)) return { tools: listed };
  return { tools: listed.map((tool) => (tool?.type ? tool : { type: "function", function: tool })) };
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Gives a command that sends the same request. The key is named, not shown. */
export function asCommand(url, body, hasKey) {
  const { return_token_ids: _, stream_options: __, ...sent } = body;
  const lines = [`curl --no-buffer ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push('-H "Authorization: Bearer $BLOCKYARD_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(sent))}`);
  return lines.join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
