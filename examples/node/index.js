// Streams a text from a gateway through gRPC, with the protos and nothing else of ours.
//
//     npm install
//     node index.js [ADDRESS] [PROMPT]
//
// A connection that breaks costs a pause: the request was sent with ON_DISCONNECT_KEEP, and ResumeGenerate gives exactly
// what has not come yet.

import path from "node:path";
import { setTimeout } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address = "127.0.0.1:50051", prompt = "def read_lines(path):\n"] = process.argv.slice(2);
const protos = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");

// 64-bit numbers (the seed) do not fit into a number of JavaScript; `oneofs` names the event that a message holds.
const definition = protoLoader.loadSync("blockyard/inference/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).blockyard.inference.v1;

const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": 16 * 1024 * 1024,
});

function listModels() {
  return new Promise((resolve, reject) => {
    client.ListModels({}, { deadline: Date.now() + 10_000 }, (error, response) =>
      error ? reject(error) : resolve(response.models),
    );
  });
}

// What happens to a request, over as many connections as it takes. Leaving the loop early cancels the call.
async function* events(spec, maxResumes = 30) {
  let accepted;
  const position = {};
  for (let numResumes = 0; ; numResumes++) {
    const call = accepted
      ? // With the request itself, also one that nobody remembers is gone on with.
        client.ResumeGenerate({ request_id: accepted.request_id, positions: [position], spec, seed: accepted.seed })
      : client.StreamGenerate({ spec });
    try {
      for await (const { event } of call) {
        if (event.event === "accepted") {
          accepted = event.accepted;
          if (numResumes) continue;
        } else if (event.event === "delta") {
          position.num_tokens = event.delta.num_tokens;
          position.num_text_bytes = event.delta.num_text_bytes;
        }
        yield event;
      }
      return;
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE || !accepted || numResumes === maxResumes) throw error;
      await setTimeout(500);
    }
  }
}

async function stream(spec) {
  for await (const event of events(spec)) {
    if (event.event === "accepted") {
      console.log(`request ${event.accepted.request_id}, seed ${event.accepted.seed}\n`);
      process.stdout.write(spec.text);
    } else if (event.event === "delta") {
      process.stdout.write(event.delta.text);
    } else if (event.event === "finished") {
      const { reason, usage } = event.finished;
      console.log(`\n\n${reason}: ${usage.num_prompt_tokens} tokens in, ${usage.num_completion_tokens} out`);
    }
  }
}

try {
  const [model] = await listModels();
  console.log(`${model.name}: up to ${model.max_model_len} tokens`);
  await stream({
    text: prompt,
    sampling: { temperature: 0 },
    stop: { max_tokens: 40 },
    on_disconnect: "ON_DISCONNECT_KEEP",
  });
} catch (error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
