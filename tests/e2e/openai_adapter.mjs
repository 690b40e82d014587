// Uses an adapter (LoRA) by its name with OpenAI's own client for Node: node openai_adapter.mjs URL MODEL ADAPTER
//
// Writes a JSON object: what the server lists, and the texts of the model and of the adapter, whole and streamed.
import OpenAI from "openai";

const [url, model, adapter] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { prompt: "def read_lines(path):\n", max_tokens: 24, temperature: 0 };

async function stream(name) {
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, model: name, stream: true }))
    text += chunk.choices[0]?.text ?? "";
  return text;
}

const listed = {};
for await (const each of client.models.list()) listed[each.id] = each.parent;
const whole = {};
for (const name of [model, adapter]) {
  const answer = await client.completions.create({ ...asked, model: name });
  whole[name] = [answer.model, answer.choices[0].text, answer.system_fingerprint];
}
console.log(JSON.stringify({ listed, whole, streamed: { [model]: await stream(model), [adapter]: await stream(adapter) } }));
