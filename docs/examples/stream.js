// Streaming client with @grpc/grpc-js whose answers survive lost connections, dead front ends, restarts and full queues.
//
//     npm install @grpc/grpc-js @grpc/proto-loader protobufjs
//     node docs/examples/stream.js 127.0.0.1:50051 "Once upon a time"      from the root of the repository
//
// It follows the rules of docs/clients.md: wait for the server's retry time, resume the stream, never repeat a token.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const { UNAVAILABLE, INTERNAL, UNKNOWN, CANCELLED } = grpc.status;
const DOMAIN = "npuserve.dev"; // ErrorInfo.domain of npuserve
const MIN_BACKOFF = 50, MAX_BACKOFF = 5000; // ms
const OPTIONS = {
  "grpc.keepalive_time_ms": 10000, "grpc.keepalive_timeout_ms": 10000, "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 1000, "grpc.enable_retries": 0,
};
// Messages and fields of google.rpc.Status that this client reads.
const DETAILS = protobuf.parse(`syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }`, { keepCase: true }).root;

// Return { reason: the server's name of the cause; "" if the server did not send the error (a connection broke),
//          retry: ms to wait before a retry; undefined if the server sent none }.
function readDetails(error) {
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

// Yield the messages of one answer. timeout: ms for the whole answer. patience: ms of consecutive failures.
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
      if (finished) return; // the answer is complete
      if (error.code === undefined) throw error;
      failure = error;
    } finally {
      if (!finished) call.cancel();
    }
    const { reason, retry } = readDetails(failure);
    const isUnknown = resuming && reason === "STREAM_NOT_FOUND";
    const isTransient = retry !== undefined || failure.code === UNAVAILABLE
      || (!reason && [INTERNAL, UNKNOWN, CANCELLED].includes(failure.code));
    if (!(isTransient || (isUnknown && !received)) || (received && !token)) throw failure;
    if (!received && reason) token = ""; // the server refused the request or has no such stream: send the request again
    if (!failures) failingSince = performance.now();
    const backoff = Math.min(MAX_BACKOFF, MIN_BACKOFF * 2 ** failures++) * (0.5 + Math.random() / 2);
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
