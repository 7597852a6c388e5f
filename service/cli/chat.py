"""`npuserve chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import contextlib
import sys

import grpc

from npuserve.service.cli import client
from npuserve.service.cli.generate import add_sampling_arguments, add_server_arguments, base_request
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2, prompt_pb2

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the user leaves, 1 if there is no server or it has no chat template."""
    try:
        request = base_request(args)
        with client.open_channel(args) as channel:
            if args.wait:
                client.wait_ready(channel, args.target, args.wait, tls=client.has_tls(args))
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            info = stub.GetModelInfo(model_pb2.GetModelInfoRequest())
            if not info.has_chat_template:
                raise client.CallFailed(f"{info.name} has no chat template; use npuserve generate")
            interactive = sys.stdin.isatty()
            if interactive:
                print(f"{info.name} at {args.target}. {HELP}")
            converse(stub, request, args, "> " if interactive else "")
    except grpc.RpcError as error:
        print(f"npuserve: {client.explain(error, args.target, tls=client.has_tls(args))}", file=sys.stderr)
        return 1
    except client.CallFailed as error:
        print(f"npuserve: {error}", file=sys.stderr)
        return 1
    return 0


def converse(
    stub: inference_service_pb2_grpc.InferenceServiceStub,
    request: generate_pb2.GenerateRequest,
    args: argparse.Namespace,
    prompt: str,
) -> None:
    """Read and answer until the user leaves. A turn that fails is reported and forgotten.

    prompt: shown before each line; "" where nobody types.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history in input()
    start = [prompt_pb2.Message(role="system", content=args.system)] if args.system is not None else []
    messages = list(start)
    while True:
        try:
            said = _read_line(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except UnicodeError:
            print("npuserve: the line is not UTF-8", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print()
            continue
        if said == "/exit":
            return
        if said == "/reset":
            messages = list(start)
            print("(forgotten)")
        elif said == "/help":
            print(HELP)
        elif said:
            request.chat.ClearField("messages")
            request.chat.messages.extend([*messages, prompt_pb2.Message(role="user", content=said)])
            try:
                answer = _answer(stub, request, args.timeout)
            except grpc.RpcError as error:
                print(f"npuserve: {client.explain(error, args.target, tls=client.has_tls(args))}", file=sys.stderr)
                continue
            messages = [*request.chat.messages, prompt_pb2.Message(role="assistant", content=answer)]


def _read_line(prompt: str) -> str:
    """Return a line of the user. Raises UnicodeError for bytes that are not UTF-8."""
    line = input(prompt)
    line.encode()  # Python may keep such bytes as lone surrogates
    return line


def _answer(
    stub: inference_service_pb2_grpc.InferenceServiceStub,
    request: generate_pb2.GenerateRequest,
    timeout: float | None,
) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C cuts it where it is."""
    text = ""
    call = stub.StreamGenerate(request, timeout=timeout)
    try:
        for message in call:
            text += message.text
            print(message.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    finally:
        call.cancel()
        print(flush=True)
    return text
