// Streams one answer and survives lost connections, dead front ends, restarts and full queues.
//
//     stream [--ca FILE] [--key FILE] [--timeout SECONDS] [--patience SECONDS] [--max-tokens N] TARGET TEXT
//
// It follows the rules of docs/clients.md, "What to do when something breaks": wait at least as long as the server says,
// resume the stream after the tokens received, never show a token twice. README.md in the folder above says how to build it.
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

import { BinaryReader } from "@bufbuild/protobuf/wire";
import * as grpc from "@grpc/grpc-js";

import { GenerateRequest, StreamGenerateResponse } from "./gen/npuserve/v1/generate";
import { InferenceServiceClient } from "./gen/npuserve/v1/inference_service";

const { UNAVAILABLE, INTERNAL, UNKNOWN, CANCELLED, DATA_LOSS } = grpc.status;
const DOMAIN = "npuserve.dev"; // ErrorInfo.domain of npuserve: a name, not an address
const MIN_BACKOFF = 50, MAX_BACKOFF = 5000; // ms
const OPTIONS = {
  "grpc.keepalive_time_ms": 10000, "grpc.keepalive_timeout_ms": 10000, "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 1000, "grpc.enable_retries": 0,
};

/** What a call ended with. reason: the server's name of the cause; empty if a connection or a proxy broke. retry: ms. */
interface Failure {
  code: grpc.status;
  message: string;
  reason: string;
  retry?: number;
  refused: string[];
}

/** Bytes and numbers of a protobuf message, by number of the field. */
function fields(bytes: Uint8Array): Map<number, (Uint8Array | number)[]> {
  const found = new Map<number, (Uint8Array | number)[]>(), reader = new BinaryReader(bytes);
  while (reader.pos < reader.len) {
    const [field, type] = reader.tag();
    if (type !== 0 && type !== 2) { reader.skip(type, field); continue; }
    const value = type === 2 ? reader.bytes() : Number(reader.int64());
    found.set(field, [...(found.get(field) ?? []), value]);
  }
  return found;
}
const bytesOf = (value?: Uint8Array | number) => (value instanceof Uint8Array ? value : new Uint8Array());
const textOf = (value?: Uint8Array | number) => new TextDecoder().decode(bytesOf(value));

/** Read google.rpc.Status, and of its details ErrorInfo, RetryInfo and BadRequest. */
function failureOf(error: grpc.ServiceError): Failure {
  const failure: Failure = { code: error.code, message: error.details, reason: "", refused: [] };
  const status = fields(bytesOf(error.metadata?.get("grpc-status-details-bin")[0] as Buffer | undefined));
  for (const detail of status.get(3) ?? []) {
    const any = fields(bytesOf(detail)), value = fields(bytesOf(any.get(2)?.[0]));
    switch (textOf(any.get(1)?.[0]).replace(/^.*\//, "")) {
      case "google.rpc.ErrorInfo":
        if (textOf(value.get(2)?.[0]) === DOMAIN) failure.reason = textOf(value.get(1)?.[0]);
        break;
      case "google.rpc.RetryInfo": {
        const delay = fields(bytesOf(value.get(1)?.[0]));
        failure.retry = Number(delay.get(1)?.[0] ?? 0) * 1e3 + Number(delay.get(2)?.[0] ?? 0) / 1e6;
        break;
      }
      case "google.rpc.BadRequest":
        for (const violation of value.get(1) ?? []) {
          const parts = fields(bytesOf(violation));
          failure.refused.push(`${textOf(parts.get(1)?.[0])}: ${textOf(parts.get(2)?.[0])}`);
        }
    }
  }
  return failure;
}

function isTransient({ code, reason, retry }: Failure): boolean {
  return retry !== undefined || code === UNAVAILABLE || (!reason && [INTERNAL, UNKNOWN, CANCELLED].includes(code));
}

function broken(code: grpc.status, details: string): grpc.ServiceError {
  return Object.assign(new Error(details), { code, details, metadata: new grpc.Metadata() });
}

const isServiceError = (error: unknown): error is grpc.ServiceError =>
  error instanceof Error && typeof (error as Partial<grpc.ServiceError>).code === "number";

/** Yield the messages of one answer. timeout: ms for the whole answer. patience: ms of failures in a row. */
export async function* stream(
  client: InferenceServiceClient, request: GenerateRequest, headers: grpc.Metadata,
  { timeout = Infinity, patience = 60000 } = {},
): AsyncGenerator<StreamGenerateResponse> {
  const deadline = Date.now() + timeout;
  let token = "", tokens = 0, received = false, failures = 0, failingSince = 0;
  for (;;) {
    const resuming = token !== "";
    const call = resuming
      ? client.resumeStream({ resumeToken: token, tokenOffset: tokens }, headers, { deadline })
      : client.streamGenerate(request, headers, { deadline });
    call.on("metadata", (metadata: grpc.Metadata) => { token = String(metadata.get("x-resume-token")[0] ?? token); });
    let finished = false, error: grpc.ServiceError;
    try {
      for await (const message of call as AsyncIterable<StreamGenerateResponse>) {
        if (message.offset !== tokens) throw broken(DATA_LOSS, `a message at token ${message.offset}, ${tokens} was next`);
        tokens += message.numTokens;
        received = true;
        if (message.numTokens) failures = 0;
        finished = message.finish !== undefined;
        yield message;
      }
      if (finished) return;
      error = broken(UNKNOWN, "the stream ended without a finish");
    } catch (caught) {
      if (finished) return; // the answer is complete
      if (!isServiceError(caught)) throw caught;
      error = caught;
    } finally {
      if (!finished) call.cancel();
    }
    const failure = failureOf(error), isUnknown = resuming && failure.reason === "STREAM_NOT_FOUND";
    if (!(isTransient(failure) || (isUnknown && !received)) || (received && !token)) throw error;
    if (!received && failure.reason) token = ""; // the server refused the request or has no such stream: send it again
    if (!failures) failingSince = performance.now();
    const backoff = Math.min(MAX_BACKOFF, MIN_BACKOFF * 2 ** failures++) * (0.5 + Math.random() / 2);
    const wait = Math.max(backoff, (failure.retry ?? 0) * (1 + Math.random() / 4));
    if (performance.now() + wait - failingSince > patience || Date.now() + wait >= deadline) throw error;
    await sleep(wait);
  }
}

async function main(): Promise<void> {
  const { values, positionals: [target, text] } = parseArgs({ allowPositionals: true, options: {
    ca: { type: "string" }, key: { type: "string" }, timeout: { type: "string", default: "Infinity" },
    patience: { type: "string", default: "60" }, "max-tokens": { type: "string", default: "64" } } });
  if (target === undefined || text === undefined) throw new Error("give TARGET and TEXT");
  const credentials = values.ca ? grpc.credentials.createSsl(readFileSync(values.ca)) : grpc.credentials.createInsecure();
  const headers = new grpc.Metadata();
  if (values.key) headers.set("authorization", `Bearer ${readFileSync(values.key, "utf8").trim()}`);
  const client = new InferenceServiceClient(target, credentials, OPTIONS);
  const request = GenerateRequest.fromPartial({ text, stopping: { maxTokens: Number(values["max-tokens"]) } });
  const limits = { timeout: Number(values.timeout) * 1e3, patience: Number(values.patience) * 1e3 };
  for await (const message of stream(client, request, headers, limits)) process.stdout.write(message.text);
  process.stdout.write("\n");
  client.close();
}

if (require.main === module)
  main().catch((error: unknown) => {
    if (!isServiceError(error)) console.error(error instanceof Error ? error.message : error);
    else {
      const { code, message, reason, refused } = failureOf(error);
      console.error([`${grpc.status[code]} ${reason}: ${message}`, ...refused.map((field) => `  ${field}`)].join("\n"));
    }
    process.exit(1);
  });
