// Calls of OpenAI's client for Node: node calls.js BASE_URL MODEL, with a JSON list of {kind, body} on stdin. Prints a JSON
// list of the answers: of a streamed call its chunks.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const calls = {
  chat: (body) => client.chat.completions.create(body),
  completion: (body) => client.completions.create(body),
  embedding: (body) => client.embeddings.create(body),
  models: () => client.models.list(),
};

const answers = [];
for (const { kind, body } of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    const answer = await calls[kind]({ model, ...body });
    if (body?.stream) {
      const chunks = [];
      for await (const chunk of answer) chunks.push(chunk);
      answers.push(chunks);
    } else {
      answers.push(answer.body ?? answer);
    }
  } catch (error) {
    answers.push({ status: error.status, error: error.message });
  }
}
process.stdout.write(JSON.stringify(answers));
