// Asks a server everything by reflection alone and prints one JSON object of what it said.
const grpc = require("@grpc/grpc-js");
const { GrpcReflection } = require("grpc-js-reflection-client");

const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };

async function packageOf(target, symbol) {
  const reflection = new GrpcReflection(target, grpc.credentials.createInsecure());
  return (await reflection.getDescriptorBySymbol(symbol)).getPackageObject(options);
}

function call(client, method, message) {
  return new Promise((resolve, reject) =>
    client[method](message, (error, answer) => (error ? reject(error) : resolve(answer))));
}

async function main(target) {
  const credentials = grpc.credentials.createInsecure();
  const inference = new (await packageOf(target, "npuserve.v1.InferenceService"))
    .npuserve.v1.InferenceService(target, credentials);
  const health = new (await packageOf(target, "grpc.health.v1.Health")).grpc.health.v1.Health(target, credentials);
  const ask = { text: "Once upon a time", sampling: { temperature: 0 }, stopping: { max_tokens: 16 } };
  const unary = await call(inference, "generate", ask);
  let stream = "";
  for await (const part of inference.streamGenerate(ask)) stream += part.text;
  const tokens = await call(inference, "tokenize", { text: "Once upon a time" });
  const info = await call(inference, "getModelInfo", {});
  const { status } = await call(health, "check", { service: "npuserve.readiness" });
  const invalid = await call(inference, "generate", { text: "x", sampling: { top_p: 7 } }).catch((error) => ({
    code: error.code, field: error.details.includes("top_p") }));
  console.log(JSON.stringify({
    unary: unary.text, stream, tokens: tokens.token_ids.length, family: info.family, health: status, invalid }));
  process.exit(0);
}

main(process.argv[2]).catch((error) => { console.error(error); process.exit(1); });
