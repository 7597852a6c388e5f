// Streams one answer from each target in turn, and prints one JSON array of what came of them.
// MODEL in the environment: the request's model.
const { connect, stream } = require("./stream.js");

const model = process.env.MODEL ? { model: process.env.MODEL } : {};

async function answer(target) {
  const client = connect(target), messages = [];
  try {
    for await (const message of stream(client, { text: "x", ...model }, { timeout: 20000, patience: 10000 })) messages.push(message);
    return {
      text: messages.map((message) => message.text).join(""), reason: messages.at(-1).finish.reason,
      tokens: messages.reduce((sum, message) => sum + message.num_tokens, 0),
    };
  } catch (error) {
    return { code: error.code, got: messages.length };
  } finally {
    client.close();
  }
}

async function main(targets) {
  const answers = [];
  for (const target of targets) answers.push(await answer(target));
  console.log(JSON.stringify(answers));
  process.exit(0);
}

main(process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
