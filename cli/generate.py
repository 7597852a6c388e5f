"""`npuserve generate PROMPT`: send one prompt to a running server and stream the answer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict, MessageToJson

from npuserve.cli import connection
from npuserve.client import Client, ClientError
from npuserve.client.attempts import add_message
from npuserve.client.request_builder import Options, build_request
from npuserve.client.structured import CONSTRAINTS
from npuserve.common.answer import Answer, sample_count, value_name
from npuserve.service.arguments import number
from npuserve.service.config import MAX_CONSTRAINT_BYTES, MAX_SAMPLES, ConfigError
from npuserve.v1 import generate_pb2

MAX_SECONDS = 1_000_000
"""Maximum of --wait and --timeout."""

# Flags of the client's options with the same names: flag, type, help.
FLAGS = (
    ("max-tokens", int, "maximum number of generated tokens"),
    ("min-tokens", int, "minimum number of generated tokens"),
    ("stop", str, "text that ends the answer; can be repeated"),
    ("temperature", float, "sampling temperature; 0 is greedy"),
    ("top-p", float, "sample from the likeliest tokens whose probabilities sum to this"),
    ("top-k", int, "sample from this many of the likeliest tokens"),
    ("min-p", float, "minimum probability of a token, relative to the likeliest token"),
    ("repetition-penalty", float, "above 1: fewer tokens that occur in the prompt or the answer"),
    ("presence-penalty", float, "above 0: fewer tokens that occur in the answer"),
    ("frequency-penalty", float, "above 0: fewer tokens in proportion to their count in the answer"),
    ("seed", int, "seed of random sampling; the same seed gives the same answer"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    add_server_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a user message of a chat")
    parser.add_argument("--system", metavar="TEXT", help="system message; needs --chat")
    parser.add_argument("--tools", metavar="FILE",
                        help="JSON list of the functions that the model may call; needs --chat")
    parser.add_argument("--tool-choice", metavar="CHOICE",
                        help="auto, none, required, or the name of a function; needs --tools")
    parser.add_argument("--parse", action="store_true",
                        help="print reasoning and tool calls apart from the text; needs --chat")
    parser.add_argument("--n", type=number(int, 1, MAX_SAMPLES), default=1, metavar="N",
                        help="number of samples, independent answers (default: %(default)s)")
    parser.add_argument("--json", action="store_true",
                        help="print each message as one JSON object; with --n above 1, each sample")
    parser.add_argument("--stats", action="store_true", help="print tokens, tokens/s and time to first token on stderr")
    _add_constraint_arguments(parser)
    add_sampling_arguments(parser)


def _add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "constraint (at most one kind)", "If the answer ends before it satisfies the constraint, the exit status is 1.")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that the schema in this file accepts")
    kinds.add_argument("--json-object", action="store_true", default=None, help="the answer is any JSON object")
    kinds.add_argument("--regex", metavar="REGEX", help="the whole answer matches this regular expression")
    kinds.add_argument("--choice", dest="choices", action="append", metavar="TEXT",
                       help="the answer is this text; repeat it for each allowed text")
    kinds.add_argument("--grammar", metavar="FILE", help="the answer matches the grammar in this file (GBNF or Lark)")
    kinds.add_argument(
        "--structural-tag", metavar="FILE", help="the answer follows the structural tag in this JSON file")


def _constraint_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the option of the constraint, if any. Raise ConfigError for a file that is unusable."""
    return {name: _read_constraint(name, value) if name in ("json_schema", "grammar", "structural_tag") else value
            for name in CONSTRAINTS if (value := getattr(args, name)) is not None}


def _read_constraint(name: str, file: str) -> str:
    """Return the text of a file with a constraint. Raise ConfigError if it is unusable."""
    flag = f"--{name.replace('_', '-')}"
    place = f"{flag}: {file}"
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_CONSTRAINT_BYTES + 1)
        text = data.decode()
    except OSError as error:
        if "{" in file or "\n" in file:
            raise ConfigError(f"{flag}: takes the path of a file, not the text itself; write it into a file") from None
        raise ConfigError(f"{place}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{place}: is not UTF-8") from None
    if len(data) > MAX_CONSTRAINT_BYTES:
        raise ConfigError(f"{place}: has more than {MAX_CONSTRAINT_BYTES} bytes")
    if name != "grammar":
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: is not JSON: {error}") from None
    return text


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    connection.add_target_argument(parser)
    parser.add_argument("--wait", type=number(float, 0, MAX_SECONDS), default=0, metavar="SECONDS",
                        help="maximum time to wait until the server is ready (default: %(default)s)")
    parser.add_argument("--timeout", type=number(float, 0.001, MAX_SECONDS), metavar="SECONDS",
                        help="deadline of each answer (default: none)")
    connection.add_connection_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the server's values)")
    for flag, kind, text in FLAGS:
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        action = "append" if flag == "stop" else "store"
        group.add_argument(f"--{flag}", type=kind, metavar=metavar, help=text, action=action)
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-text token")


def sampling_options(args: argparse.Namespace) -> Options:
    """Return the options of `add_sampling_arguments`. Raise ConfigError for a number that its field cannot hold."""
    names = (*(flag.replace("-", "_") for flag, _, _ in FLAGS), "ignore_eos")
    given = {name: getattr(args, name) for name in names}
    options = cast(Options, {name: value for name, value in given.items() if value is not None and value is not False})
    try:
        build_request("", options)
    except ValueError as error:
        name = str(error).partition(":")[0]
        raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is not in {_range(name)}") from None
    return options


def _range(name: str) -> str:
    """Return the range of the numbers that an integer field of sampling or stopping can hold."""
    parts = (generate_pb2.SamplingParams.DESCRIPTOR, generate_pb2.StoppingParams.DESCRIPTOR)
    kind = next(part.fields_by_name[name].type for part in parts if name in part.fields_by_name)
    low, high = {
        FieldDescriptor.TYPE_INT32: (-1 << 31, (1 << 31) - 1), FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
        FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1)}[kind]
    return f"[{low}, {high}]"


def run(args: argparse.Namespace) -> int:
    """Return 0 for a complete answer, 1 after an error, which is printed. Raise ConfigError for invalid arguments.

    A constraint that an answer does not satisfy is an error.
    """
    options = sampling_options(args)
    options.update(_constraint_options(args))  # type: ignore[typeddict-item]
    if args.n > 1:
        options["n"] = args.n
    if args.system is not None and not args.chat:
        raise ConfigError("--system: is for --chat only")
    options.update(_chat_options(args))
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        prompt = [*system, {"role": "user", "content": prompt}]
    try:
        with connection.open_client(args) as client:
            finishes = _stream(client, build_request(prompt, options), args)
    except (ClientError, connection.ConnectionFailed) as error:
        return connection.print_error(error, args)
    if any(name in options for name in CONSTRAINTS):
        cut = [finish for finish in finishes if not finish.grammar_completed]
        if cut:
            sentence = f"the answer does not satisfy the constraint; it ended with {_reasons(cut)}"
            print(f"npuserve: {sentence}", file=sys.stderr)
            return 1
    return 0


def _chat_options(args: argparse.Namespace) -> Options:
    """Return the options of tools. Raise ConfigError for a flag without --chat, and for a malformed file."""
    for name in ("tools", "tool_choice", "parse"):
        if getattr(args, name) and not args.chat:
            raise ConfigError(f"--{name.replace('_', '-')}: is for --chat only")
    options = Options()
    if args.tools:
        try:
            tools = json.loads(Path(args.tools).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--tools: {args.tools} cannot be read: {error}") from None
        if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ConfigError(f"--tools: {args.tools} must be a JSON list of objects")
        options["tools"] = tools
    if args.tool_choice:
        modes = ("auto", "none", "required")
        options["tool_choice"] = args.tool_choice if args.tool_choice in modes else {"name": args.tool_choice}
    if args.parse:
        options["parse_output"] = True
    return options


def _read_stdin() -> str:
    """Return the whole input. Raise ConfigError if it is not UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"PROMPT: stdin is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}") from None


class Printer(Protocol):
    """Printer of the messages of a stream."""

    def add(self, message: generate_pb2.StreamGenerateResponse) -> None:
        """Print what the message completes."""

    def close(self) -> None:
        """Print the rest."""


class TextPrinter:
    """Printer of the text of an answer as it arrives, with its reasoning before it and its tool calls a line each.

    Samples are printed in order of index, each after a heading: the first one that has not ended as it arrives, the
    others when their turn comes.
    """

    def __init__(self, samples: int):
        self._has_headings = samples > 1
        self._current = -1  # sample whose heading was printed last
        self._is_line_open = False
        self._waiting: dict[int, list[str]] = {}  # text that is not printed, by index
        self._ended: set[int] = set()
        self._reasoning: set[int] = set()  # samples whose last part was reasoning

    def add(self, message: generate_pb2.StreamGenerateResponse) -> None:
        """Print a message, after the samples with a smaller index have ended."""
        self._waiting.setdefault(message.index, []).extend(self._parts(message))
        if message.HasField("finish"):
            self._ended.add(message.index)
        self._print(self._current)
        while (self._current < 0 or self._current in self._ended) and self._current + 1 in self._waiting:
            self._begin(self._current + 1)

    def close(self) -> None:
        for index in sorted(self._waiting):  # samples that an error has cut
            self._begin(index)
        self._end_line()

    def _parts(self, message: generate_pb2.StreamGenerateResponse) -> Iterator[str]:
        """Yield the texts of a message."""
        if message.reasoning:
            self._reasoning.add(message.index)
            yield message.reasoning
        if message.text:
            if message.index in self._reasoning:
                self._reasoning.remove(message.index)
                yield "\n\n"
            yield message.text
        for call in message.tool_calls:
            yield f"\n{call.name} {call.arguments}" if call.name else call.arguments

    def _begin(self, index: int) -> None:
        self._end_line()
        self._current = index
        if self._has_headings:
            print(f"--- sample {index} ---", flush=True)
        self._is_line_open = True
        self._print(index)

    def _end_line(self) -> None:
        if self._is_line_open:
            print(flush=True)
        self._is_line_open = False

    def _print(self, index: int) -> None:
        print("".join(self._waiting.pop(index, ())), end="", flush=True)


class JsonPrinter:
    """Printer of one JSON object for each message of an answer, or for each sample when it ends."""

    def __init__(self, samples: int):
        self._samples = samples
        self._answers: dict[int, Answer] = {}  # by index, each with one sample

    def add(self, message: generate_pb2.StreamGenerateResponse) -> None:
        if self._samples == 1:
            print(MessageToJson(message, indent=None, preserving_proto_field_name=True), flush=True)
            return
        answer = self._answers.setdefault(message.index, Answer(self._samples))
        add_message(answer, message)
        if message.HasField("finish"):
            (sample,) = answer.response().samples
            fields = MessageToDict(sample, preserving_proto_field_name=True)
            print(json.dumps({"index": sample.index, **fields}), flush=True)  # protobuf leaves out an index of 0

    def close(self) -> None:
        return


def _stream(
    client: Client, request: generate_pb2.GenerateRequest, args: argparse.Namespace
) -> Collection[generate_pb2.Finish]:
    """Print the answer, why it is empty, and --stats after it. Return the finish of each sample. Raise ClientError."""
    began = time.monotonic()
    first = None
    has_text = False
    stream = client.stream(request, timeout=args.timeout)
    printer: Printer = (JsonPrinter if args.json else TextPrinter)(sample_count(request))
    try:
        for message in stream:
            first = first or time.monotonic()
            has_text = has_text or bool(message.text)
            printer.add(message)
    finally:
        stream.cancel()
        printer.close()
    reasons = {finish.reason for finish in stream.attempts.finishes.values()}
    is_free = not request.HasField("chat") and request.WhichOneof("constraint") is None
    if is_free and not has_text and reasons == {generate_pb2.FINISH_REASON_EOS}:
        print("npuserve: the model ended at once; for a chat model use --chat", file=sys.stderr)
    if args.stats and stream.attempts.is_complete and first:
        print(summary(stream.attempts.finishes.values(), began, first, time.monotonic()), file=sys.stderr)
    return stream.attempts.finishes.values()


def summary(finishes: Collection[generate_pb2.Finish], began: float, first: float, ended: float) -> str:
    """Return `64 tokens, 812 tokens/s, first after 31 ms (LENGTH)`. The rate excludes the first token.

    finishes: finishes of all samples, whose tokens are added up.
    began, first, ended: times in seconds of the request, the first message and the end.
    """
    tokens = sum(finish.usage.generated_tokens for finish in finishes)
    count = f"{tokens} token{'s' * (tokens != 1)}" + (f" in {len(finishes)} samples" if len(finishes) > 1 else "")
    rate = f", {(tokens - 1) / (ended - first):.0f} tokens/s" if tokens > 1 and ended > first else ""
    return f"{count}{rate}, first after {(first - began) * 1e3:.0f} ms ({_reasons(finishes)})"


def _reasons(finishes: Collection[generate_pb2.Finish]) -> str:
    """Return the different finish reasons: `EOS, LENGTH`."""
    return ", ".join(sorted({
        value_name(generate_pb2.FinishReason, finish.reason, "FINISH_REASON_") for finish in finishes}))
