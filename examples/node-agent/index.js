// An agent by OpenAI's own client: a loop in which the model calls a tool, and an answer that keeps to a JSON schema.
//
//     npm install
//     node index.js [URL [TOOL_CHOICE]]
//
// The demo model calls none by itself. It can be made to: `blockyard serve --chat-template examples/tools.jinja`, and
// `required` as TOOL_CHOICE, which is that of the first turn.

import OpenAI from "openai";

const MAX_TURNS = 4;
const TEMPERATURES = { Oslo: 4, Lima: 19 };
const [url = "http://127.0.0.1:8000", toolChoice = "auto"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });

const tool = {
  type: "function",
  function: {
    name: "temperature",
    description: "Tells how warm it is in a city, in degrees Celsius.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: Object.keys(TEMPERATURES) } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const clothes = {
  type: "object",
  properties: {
    coat: { type: "string", enum: ["none", "thin", "thick"] },
    layers: { type: "integer", minimum: 1, maximum: 4 },
  },
  required: ["coat", "layers"],
  additionalProperties: false,
};

function temperature({ city }) {
  return city in TEMPERATURES ? `${TEMPERATURES[city]} °C` : `${city} is not known`;
}

/** Asks, and runs the tools that the model calls, until it calls none; returns the conversation. */
async function run(model, question, choice) {
  const messages = [{ role: "user", content: question }];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const asked = { model, messages, tools: [tool], parallel_tool_calls: false, max_completion_tokens: 200 };
    const answer = await client.chat.completions.create({ ...asked, tool_choice: turn ? "auto" : choice });
    const { message } = answer.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) break;
    for (const call of message.tool_calls) {
      console.log(`calls ${call.function.name}(${call.function.arguments})`);
      const content = temperature(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
  return messages;
}

const model = (await client.models.list()).data[0].id;
const messages = await run(model, "How warm is it in Oslo?", toolChoice);
console.log(`says ${JSON.stringify(messages.at(-1).content)}`);

const conclusion = await client.chat.completions.create({
  model,
  messages: [...messages, { role: "user", content: "What should I wear?" }],
  max_completion_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "clothes", schema: clothes } },
});
console.log(`parsed ${JSON.stringify(JSON.parse(conclusion.choices[0].message.content))}`);
