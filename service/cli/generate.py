"""`npuserve generate PROMPT`: one prompt to a running server, the answer as it comes."""

from __future__ import annotations

import argparse
import sys
import time

import grpc
from google.protobuf.json_format import MessageToJson

from npuserve.service.arguments import number, target
from npuserve.service.cli import client
from npuserve.service.config import ConfigError
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, prompt_pb2

TARGET = "127.0.0.1:50051"
MAX_SECONDS = 1_000_000
"""Of --wait and --timeout."""

# Flag, the message of GenerateRequest that its field of the same name is in, type, help.
FIELDS = (
    ("max-tokens", "stopping", int, "most tokens of the answer"),
    ("min-tokens", "stopping", int, "no end before this many tokens"),
    ("stop", "stopping", str, "a text that ends the answer; may be given again"),
    ("temperature", "sampling", float, "0 is greedy"),
    ("top-p", "sampling", float, "the likeliest tokens that add up to this probability"),
    ("top-k", "sampling", int, "this many likeliest tokens"),
    ("min-p", "sampling", float, "tokens at least this times as likely as the likeliest"),
    ("repetition-penalty", "sampling", float, "above 1: fewer tokens that there have been"),
    ("presence-penalty", "sampling", float, "above 0: fewer tokens that the answer has"),
    ("frequency-penalty", "sampling", float, "above 0: fewer tokens that the answer has often"),
    ("seed", "sampling", int, "the same seed gives the same answer"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    add_server_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="send it as a user's message, in the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--json", action="store_true", help="print each message as one JSON object")
    parser.add_argument("--stats", action="store_true", help="a line on stderr: tokens, tokens/s, time to first token")
    add_sampling_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", type=target, default=TARGET, metavar="HOST:PORT", help="the server (default: %(default)s)")
    parser.add_argument("--wait", type=number(float, 0, MAX_SECONDS), default=0, metavar="SECONDS",
                        help="wait so long for it to be ready")
    parser.add_argument("--timeout", type=number(float, 0.001, MAX_SECONDS), metavar="SECONDS",
                        help="a call's deadline")
    client.add_connection_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (absent: the server's defaults)")
    for flag, _, kind, text in FIELDS:
        metavar, action = {int: "N", float: "X", str: "TEXT"}[kind], "append" if flag == "stop" else "store"
        group.add_argument(f"--{flag}", type=kind, metavar=metavar, help=text, action=action)
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")


def base_request(args: argparse.Namespace) -> generate_pb2.GenerateRequest:
    """Return a request without a prompt. Raises ConfigError for a number that its field cannot hold."""
    request = generate_pb2.GenerateRequest()
    for flag, part, _, _ in FIELDS:
        name = flag.replace("-", "_")
        value = getattr(args, name)
        try:
            if isinstance(value, list):
                getattr(request, part).stop.extend(value)
            elif value is not None:
                setattr(getattr(request, part), name, value)
        except ValueError:
            raise ConfigError(f"--{flag}: {value} is out of range") from None
    if args.ignore_eos:
        request.stopping.ignore_eos = True
    return request


def run(args: argparse.Namespace) -> int:
    """Return 0 for an answer, 1 for an error, which is on stderr. Raises ConfigError for wrong arguments."""
    request = base_request(args)
    if args.system is not None and not args.chat:
        raise ConfigError("--system: is for --chat only")
    prompt = _from_stdin() if args.prompt == "-" else args.prompt
    try:
        if args.chat:
            if args.system is not None:
                request.chat.messages.append(prompt_pb2.Message(role="system", content=args.system))
            request.chat.messages.append(prompt_pb2.Message(role="user", content=prompt))
        else:
            request.text = prompt
        with client.open_channel(args) as channel:
            if args.wait:
                client.wait_ready(channel, args.target, args.wait, tls=client.has_tls(args))
            return _stream(channel, request, args)
    except grpc.RpcError as error:
        return _fail(client.explain(error, args.target, tls=client.has_tls(args)))
    except client.CallFailed as error:
        return _fail(str(error))


def _from_stdin() -> str:
    """Return the whole input. Raises ConfigError if it is not UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"PROMPT: stdin is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None


def _stream(channel: grpc.Channel, request: generate_pb2.GenerateRequest, args: argparse.Namespace) -> int:
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    began, first, finish = time.monotonic(), None, None
    call = stub.StreamGenerate(request, timeout=args.timeout)
    try:
        for message in call:
            first = first or time.monotonic()
            if args.json:
                print(MessageToJson(message, indent=None, preserving_proto_field_name=True), flush=True)
            else:
                print(message.text, end="", flush=True)
            if message.HasField("finish"):
                finish = message.finish
    finally:
        call.cancel()
        if not args.json and first:
            print(flush=True)
    if finish is None or first is None:
        return _fail(f"{args.target}: the stream ended without a finish")
    if args.stats:
        print(summary(finish, began, first, time.monotonic()), file=sys.stderr)
    return 0


def summary(finish: generate_pb2.Finish, began: float, first: float, ended: float) -> str:
    """`64 tokens, 812 tokens/s, first after 31 ms (LENGTH)`; the rate is of the tokens after the first."""
    tokens = finish.usage.generated_tokens
    rate = f", {(tokens - 1) / (ended - first):.0f} tokens/s" if tokens > 1 and ended > first else ""
    reason = generate_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")
    return f"{tokens} token{'s' * (tokens != 1)}{rate}, first after {(first - began) * 1e3:.0f} ms ({reason})"


def _fail(message: str) -> int:
    print(f"npuserve: {message}", file=sys.stderr)
    return 1
