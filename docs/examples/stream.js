// An answer that survives lost connections, dead front ends, restarts and full queues, with @grpc/grpc-js.
//
//     npm install @grpc/grpc-js @grpc/proto-loader protobufjs
//     node docs/examples/stream.js 127.0.0.1:50051 "Once upon a time"      from the root of the repository
//
// The rules are those of docs/clients.md: wait as long as the server says, go on where the stream broke, never repeat.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const { UNAVAILABLE, INTERNAL, UNKNOWN, CANCELLED } = grpc.status;
const DOMAIN = "npuserve.dev"; // of the server's own reasons
const FIRST_WAIT = 50, LONGEST_WAIT = 5000; // ms
const OPTIONS = {
  "grpc.keepalive_time_ms": 10000, "grpc.keepalive_timeout_ms": 10000, "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 1000, "grpc.enable_retries": 0,
};
// What google.rpc.Status is made of, as far as it is read here.
const DETAILS = protobuf.parse(`syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }`, { keepCase: true }).root;

// Returns { reason: the server's name of the cause, "" if the error is not the server's own (a connection broke),
//           retry: ms after which to try again, undefined if the server gave none }
function read(error) {
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const details = bytes ? DETAILS.lookupType("Status").decode(bytes).details : [];
  const find = (name) => {
    const detail = details.find(({ type_url }) => type_url.endsWith(`/google.rpc.${name}`));
    return detail && DETAILS.lookupType(name).decode(detail.value);
  };
  const info = find("ErrorInfo"), wait = find("RetryInfo");
  const delay = wait && (wait.retry_delay ?? { seconds: 0, nanos: 0 });
  return {
    reason: info?.domain === DOMAIN ? info.reason : "",
    retry: delay && Number(delay.seconds) * 1e3 + delay.nanos / 1e6,
  };
}

// Yields the messages of one answer. timeout: ms for the whole. patience: ms of failures in a row.
async function* stream(client, request, { timeout = Infinity, patience = 60000 } = {}) {
  const deadline = timeout === Infinity ? Infinity : Date.now() + timeout;
  let token = "", tokens = 0, received = false, failures = 0, failingSince = 0;
  for (;;) {
    const resuming = token !== "";
    const call = resuming
      ? client.resumeStream({ resume_token: token, token_offset: tokens }, { deadline })
      : client.streamGenerate(request, { deadline });
    call.on("metadata", (metadata) => { [token = token] = metadata.get("x-resume-token"); });
    let finished = false, failure;
    try {
      for await (const message of call) {
        if (message.offset !== tokens) throw new Error(`a message at token ${message.offset}, ${tokens} was next`);
        tokens += message.num_tokens;
        received = true;
        if (message.num_tokens) failures = 0;
        finished = Boolean(message.finish);
        yield message;
      }
      if (finished) return;
      failure = Object.assign(new Error("the stream ended without a finish"), { code: UNKNOWN });
    } catch (error) {
      if (finished) return; // the answer is whole
      if (error.code === undefined) throw error;
      failure = error;
    } finally {
      if (!finished) call.cancel();
    }
    const { reason, retry } = read(failure);
    const unknown = resuming && reason === "STREAM_NOT_FOUND";
    const passing = retry !== undefined || failure.code === UNAVAILABLE
      || (!reason && [INTERNAL, UNKNOWN, CANCELLED].includes(failure.code));
    if (!(passing || (unknown && !received)) || (received && !token)) throw failure;
    if (!received && reason) token = ""; // the server did not accept the request, or forgot the stream: ask anew
    if (!failures) failingSince = performance.now();
    const backoff = Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** failures++) * (0.5 + Math.random() / 2);
    const wait = Math.max(backoff, (retry ?? 0) * (1 + Math.random() / 4));
    if (performance.now() + wait - failingSince > patience || Date.now() + wait >= deadline) throw failure;
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function connect(target, credentials = grpc.credentials.createInsecure()) {
  const definition = loader.loadSync("npuserve/v1/inference_service.proto", {
    includeDirs: [process.env.PROTOS ?? path.join(__dirname, "..", "..", "protos")],
    keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true });
  const { InferenceService } = grpc.loadPackageDefinition(definition).npuserve.v1;
  return new InferenceService(target, credentials, OPTIONS);
}

async function main(target, text) {
  const client = connect(target);
  for await (const message of stream(client, { text, stopping: { max_tokens: 64 } })) process.stdout.write(message.text);
  process.stdout.write("\n");
  client.close();
}

module.exports = { connect, stream };
if (require.main === module)
  main(...process.argv.slice(2)).catch((error) => { console.error(error.message); process.exit(1); });
