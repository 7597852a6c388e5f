"""From the protobuf message to the engine's `Request`: every field is checked, nothing is ignored in silence.

Pure functions. Bad fields are collected in errors.Violations: one InvalidField names each by its path in the message
and says what is allowed.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from npuserve.npu.step import SamplingParams
from npuserve.service.errors import InvalidField, ModelNotFound, NoChatTemplate, NoTokenizer, Reserved, Violations
from npuserve.service.ipc.messages import ModelInfo, Request
from npuserve.service.requests.message_limits import MAX_TOOLS, MAX_TURNS
from npuserve.service.requests.prompt_size import check_length, too_many
from npuserve.service.text.model_folder import DEFAULT_RANGES, ModelFolder, Range
from npuserve.service.text.plain_text import Prompt
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2, tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

Number = TypeVar("Number", int, float)

MIN_TEMPERATURE = 0.01
"""Sampling below this is as good as greedy and overflows; a smaller one above 0 is raised to it, as vLLM does."""
PENALTY = Range(-2, 2)
BIAS = Range(-100, 100)
PRIORITY = Range(-100, 100)
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 128
MAX_CONSTRAINT = 65536
"""Bytes of a schema, a regex, a grammar or all choices."""
ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Of a chat's messages; a chat template that compares the role with other names adds them."""
MAX_UNARY_BYTES = 4 << 20
"""Of a message that gRPC's clients receive unless they are told otherwise."""
BYTES_PER_LOGPROB = 24
"""Of a serialized TokenLogprob, as estimated: 2 of header, 4 of id, 5 of logprob, 4 of rank, 2 + 7 of text."""
@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request: what the engine gets, and what the front end keeps for itself."""

    request: Request
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """What the server and the caller's key allow.

    priorities: range of a request's priority. chat_special_tokens: see ServerConfig.
    """

    priorities: Range = PRIORITY
    chat_special_tokens: bool = False


def request_id(message: pb.GenerateRequest) -> str:
    """The client's, or a new one if there is none, or none that can travel as metadata: `check` refuses that."""
    found = message.request_id
    fits = 1 <= len(found) <= MAX_REQUEST_ID and all("!" <= c <= "~" for c in found)
    return found if fits else uuid.uuid4().hex


def check_model(name: str | None, folder: ModelFolder) -> None:
    """ModelNotFound if a request names another model than the served one."""
    if name is not None and name not in folder.names:
        raise ModelNotFound(f"model: {_cut(name)} is not served here; this server serves {folder.name!r}")


def check(
    message: pb.GenerateRequest, folder: ModelFolder, info: ModelInfo, name: str, arrival: float,
    policy: Policy = Policy(),
) -> Ask:
    """Check the whole request and tokenize its prompt.

    name: its `request_id`.
    arrival: time.monotonic() seconds.

    Raises InvalidField with all bad fields, ModelNotFound, Reserved, NoTokenizer, NoChatTemplate.
    """
    check_model(message.model if message.HasField("model") else None, folder)
    bad = Violations()
    if message.HasField("request_id") and message.request_id != name:
        bad.add("request_id", (
            f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces, "
            f"got {_cut(message.request_id)}"))
    _check_reserved(message, bad)
    vocabulary, context = info.vocabulary_size, info.max_model_len
    stopping, output, scheduling = message.stopping, message.output, message.scheduling
    stop_token_ids = _ids("stopping.stop_token_ids", stopping.stop_token_ids, vocabulary, bad, MAX_STOP_TOKEN_IDS)
    eos = frozenset() if stopping.ignore_eos else folder.eos_token_ids
    stop = _stop(stopping.stop, folder.tokenizer, bad)
    sampling = _sampling(message.sampling, folder.defaults, vocabulary, bad)
    logprobs = _logprobs(output, "logprobs", vocabulary, bad)
    prompt_logprobs = _logprobs(output, "prompt_logprobs", vocabulary, bad)
    lowest, highest, _ = policy.priorities
    usual = int(min(max(0, lowest), highest))
    priority = scheduling.priority if scheduling.HasField("priority") else usual
    _number("scheduling.priority", priority, policy.priorities, bad)
    if len(scheduling.cache_salt) > MAX_CACHE_SALT:
        bad.add(
            "scheduling.cache_salt",
            f"must be at most {MAX_CACHE_SALT} characters, got {len(scheduling.cache_salt)}")
    ending = eos | stop_token_ids
    allowed = sampling.pop("allowed_token_ids")
    if stopping.min_tokens and allowed and ending.issuperset(allowed):
        bad.add("sampling.allowed_token_ids", "must hold a token that does not end the answer, for stopping.min_tokens")

    prompt_ids: list[int] = []
    with bad.collect():
        prompt_ids = prompt_token_ids(message, folder.tokenizer, info, policy)
    max_tokens, min_tokens = _lengths(stopping, len(prompt_ids), context, bad)
    bad.check()
    request = Request(
        name, prompt_ids, max_tokens, arrival,
        sampling=SamplingParams(
            **sampling, allowed_token_ids=allowed, min_tokens=min_tokens,
            ending_ids=tuple(sorted(token for token in ending if token < vocabulary)),
            logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        stop_token_ids=stop_token_ids, eos_token_ids=eos, priority=priority,
        bypass_prefix_cache=scheduling.bypass_prefix_cache, cache_salt=scheduling.cache_salt)
    skip = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
    return Ask(request, stop, stopping.include_stop, skip, output.return_token_ids)


def check_unary_size(request: Request) -> None:
    """Raise InvalidField if the prompt's log-probabilities alone exceed the largest message that most clients take."""
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return
    most = MAX_UNARY_BYTES // (BYTES_PER_LOGPROB * (wanted + 1))
    if len(request.prompt_ids) > most:
        raise InvalidField(
            "output.prompt_logprobs",
            f"the answer must fit {MAX_UNARY_BYTES >> 20} MiB, the largest message that clients take by default: "
            f"at most {most} tokens of prompt with {wanted} log-probabilities each, got {len(request.prompt_ids)}; "
            "StreamGenerate has no such limit")


def prompt_token_ids(
    message: pb.GenerateRequest, tokenizer: Tokenizer | None, info: ModelInfo, policy: Policy = Policy()
) -> list[int]:
    """Return the prompt's ids: at least one, and fewer than the context. Slow for long texts."""
    kind = message.WhichOneof("prompt")
    room, vocabulary = info.max_model_len - 1, info.vocabulary_size
    if kind is None:
        raise InvalidField("prompt", "one of text, token_ids and chat is needed")
    if kind == "token_ids":
        if message.HasField("parse_special_tokens"):
            raise InvalidField("parse_special_tokens", "is for text and chat; token_ids has no text to parse")
        ids = list(message.token_ids.ids)
        if len(ids) <= room:
            bad = Violations()
            _ids("token_ids.ids", ids, vocabulary, bad)
            bad.check()
    else:
        prompt = _prompt(message, tokenizer, policy, info.max_model_len)
        text = prompt.text
        check_length(text, kind, tokenizer, info.max_model_len)
        # An empty text is refused also where the tokenizer adds a beginning-of-text token.
        ids = encode(prompt, kind, tokenizer, special=kind == "text") if text or tokenizer is None else []
    if not ids:
        raise InvalidField(kind, "must be at least one token, got an empty prompt")
    if len(ids) > room:
        raise InvalidField(kind, too_many(len(ids), info.max_model_len))
    if kind != "token_ids" and max(ids) >= vocabulary:
        raise InvalidField(
            kind, f"the tokenizer makes token id {max(ids)} of it, and the model's ids are in [0, {vocabulary - 1}]")
    return ids


def tokenize(
    message: tokenize_pb2.TokenizeRequest, tokenizer: Tokenizer | None, max_model_len: int, policy: Policy = Policy()
) -> tokenize_pb2.TokenizeResponse:
    """Return a Tokenize call's answer: ids as `check` would make them of the same prompt. Slow for long texts.

    Raises InvalidField for a text of more than max_model_len tokens.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidField("prompt", "one of text and chat is needed")
    prompt = _prompt(message, tokenizer, policy, max_model_len)
    check_length(prompt.text, kind, tokenizer, max_model_len)
    special = message.add_special_tokens if message.HasField("add_special_tokens") else kind == "text"
    ids = encode(prompt, kind, tokenizer, special)
    if len(ids) > max_model_len:
        raise InvalidField(kind, f"{len(ids)} tokens are too many; max_model_len is {max_model_len}")
    return tokenize_pb2.TokenizeResponse(token_ids=ids, text=prompt.text if kind == "chat" else "")


def detokenize(
    message: tokenize_pb2.DetokenizeRequest, tokenizer: Tokenizer | None, vocabulary: int, max_model_len: int
) -> str:
    """Return a Detokenize call's answer. Raises InvalidField for more than max_model_len ids."""
    if tokenizer is None:
        raise NoTokenizer("token_ids: the served model has no tokenizer")
    if len(message.token_ids) > max_model_len:
        raise InvalidField(
            "token_ids", f"{len(message.token_ids)} ids are too many; max_model_len is {max_model_len}")
    bad = Violations()
    _ids("token_ids", message.token_ids, vocabulary, bad)
    bad.check()
    return tokenizer.decode(list(message.token_ids), message.skip_special_tokens)


def _prompt(
    message: pb.GenerateRequest | tokenize_pb2.TokenizeRequest, tokenizer: Tokenizer | None, policy: Policy,
    max_model_len: int,
) -> Prompt:
    """Return the prompt's text, and how its special tokens are read."""
    if message.WhichOneof("prompt") == "chat":
        parse = message.parse_special_tokens if message.HasField("parse_special_tokens") else policy.chat_special_tokens
        return chat_prompt(message.chat, tokenizer, parse, max_model_len)
    parse = message.parse_special_tokens if message.HasField("parse_special_tokens") else True
    return Prompt(message.text, None if parse else message.text)


def encode(prompt: Prompt, field: str, tokenizer: Tokenizer | None, special: bool) -> list[int]:
    """Return the ids of a prompt's text.

    special: add the beginning-of-text token and its like, where the tokenizer has them.
    """
    if tokenizer is None:
        raise NoTokenizer(f"{field}: the served model has no tokenizer; send token_ids")
    if prompt.renamed is None:
        return tokenizer.encode(prompt.text, add_special_tokens=special)
    return tokenizer.plain_text.encode(prompt, field, special)


def chat_prompt(
    chat: prompt_pb2.Chat, tokenizer: Tokenizer | None, parse_special_tokens: bool, max_model_len: int
) -> Prompt:
    """Return the conversation as the model's chat template writes it.

    parse_special_tokens: the text of special tokens in the conversation is read as those tokens.
    Raises InvalidField for a conversation whose turns alone have more text than max_model_len tokens can have.
    """
    if tokenizer is None:
        raise NoTokenizer("chat: the served model has no tokenizer; send token_ids")
    if tokenizer.chat is None:
        raise NoChatTemplate("chat: the served model has no chat template; send text or token_ids")
    if not chat.messages:
        raise InvalidField("chat.messages", "must be at least one message, got none")
    bad = Violations()
    for field, found, most in (("messages", chat.messages, MAX_TURNS), ("tools", chat.tools, MAX_TOOLS)):
        if len(found) > most:
            bad.add(f"chat.{field}", f"must be at most {most}, got {len(found)}")
    most, size = max_model_len * tokenizer.max_token_bytes, sum(len(turn.content) for turn in chat.messages)
    if size > most:
        bad.add("chat.messages", (
            f"must have at most {most} characters of content, as max_model_len is {max_model_len}, got {size}"))
    bad.check()
    roles = ROLES | tokenizer.chat.roles
    messages = [_turn(index, turn, roles, bad) for index, turn in enumerate(chat.messages)]
    from npuserve.service.text.chat_template import check_unicode, from_json, from_struct

    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    for index, tool in enumerate(chat.tools):
        with bad.collect():
            tools.append(from_json(tool, f"chat.tools[{index}]"))
    with bad.collect():
        arguments = from_struct(chat.template_args, "chat.template_args")
    bad.check()
    if parse_special_tokens:
        prompt = Prompt(tokenizer.chat.render(messages, arguments, tools))
    else:
        prompt = tokenizer.plain_text.render(tokenizer.chat, messages, arguments, tools)
    check_unicode(prompt.text, "chat")
    return prompt


def _turn(index: int, turn: prompt_pb2.Message, roles: frozenset[str], bad: Violations) -> dict[str, Any]:
    from npuserve.service.text.chat_template import from_json

    path = f"chat.messages[{index}]"
    if not turn.role:
        bad.add(f"{path}.role", "must not be empty")
    elif turn.role not in roles:
        bad.add(f"{path}.role", f"must be one of {', '.join(sorted(roles))}; got {_cut(turn.role)}")
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if turn.HasField(name):
            message[name] = getattr(turn, name)
    if turn.tool_calls:
        calls: list[dict[str, Any]] = []
        message["tool_calls"] = calls
        for i, call in enumerate(turn.tool_calls):
            with bad.collect():
                calls.append(from_json(call, f"{path}.tool_calls[{i}]"))
    return message


def _check_reserved(message: pb.GenerateRequest, bad: Violations) -> None:
    constraint = message.WhichOneof("constraint")
    if constraint:
        if message.ByteSize() > MAX_CONSTRAINT:  # not even looked at where the rest is small enough
            _check_constraint(constraint, getattr(message, constraint))
        raise Reserved(constraint)
    if message.HasField("n") and message.n != 1:
        if message.n:
            raise Reserved("n")
        bad.add("n", "must be 1, got 0")


def _check_constraint(name: str, constraint: Any) -> None:
    size = constraint.ByteSize() if name == "choices" else len(constraint.encode()) if name != "json_object" else 1
    if size > MAX_CONSTRAINT:
        raise InvalidField(name, f"must be at most {MAX_CONSTRAINT} bytes, got {size}")


def _sampling(
    given: pb.SamplingParams, defaults: dict[str, float], vocabulary: int, bad: Violations
) -> dict[str, Any]:
    """Return the keyword arguments of step.SamplingParams."""

    def number(name: str, default: float) -> Any:
        value = getattr(given, name) if given.HasField(name) else defaults.get(name, default)  # type: ignore[arg-type]
        return _number(f"sampling.{name}", value, DEFAULT_RANGES.get(name, PENALTY), bad)

    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        bad.add("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, got {len(given.logit_bias)}")
    else:
        for token, bias in given.logit_bias.items():
            if token >= vocabulary:
                bad.add(f"sampling.logit_bias[{token}]", f"token id must be in [0, {vocabulary - 1}], got {token}")
            _number(f"sampling.logit_bias[{token}]", bias, BIAS, bad)
    temperature = number("temperature", 1.0)
    top_k = number("top_k", 0)
    return {
        "temperature": max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        "top_p": number("top_p", 1.0),
        "top_k": top_k if 0 < top_k < vocabulary else 0,
        "min_p": number("min_p", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "presence_penalty": number("presence_penalty", 0.0),
        "frequency_penalty": number("frequency_penalty", 0.0),
        "seed": given.seed if given.HasField("seed") else random.getrandbits(64),
        "logit_bias": dict(given.logit_bias),
        "allowed_token_ids": tuple(sorted(
            _ids("sampling.allowed_token_ids", given.allowed_token_ids, vocabulary, bad))),
    }


def _lengths(stopping: pb.StoppingParams, prompt: int, context: int, bad: Violations) -> tuple[int, int]:
    """Return max_tokens and min_tokens. prompt: its tokens, 0 where it is bad and their number is not known."""
    room = context - (prompt or 1)
    has = f"has {prompt} token{'s' * (prompt != 1)}" if prompt else "needs at least 1 token"
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else room
    if not 1 <= max_tokens <= room:
        bad.add("stopping.max_tokens", (
            f"must be in [1, {room}], as max_model_len is {context} and the prompt {has}, got {max_tokens}"))
    elif stopping.min_tokens > max_tokens:
        bad.add("stopping.min_tokens", f"must be in [0, {max_tokens}], got {stopping.min_tokens}")
    return max_tokens, stopping.min_tokens


def _stop(strings: Sequence[str], tokenizer: Tokenizer | None, bad: Violations) -> tuple[str, ...]:
    if strings and tokenizer is None:
        raise NoTokenizer("stopping.stop: the served model has no tokenizer; use stop_token_ids")
    if len(strings) > MAX_STOP:
        bad.add("stopping.stop", f"must be at most {MAX_STOP} strings, got {len(strings)}")
        return ()
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            bad.add(f"stopping.stop[{index}]", f"must be 1 to {MAX_STOP_LENGTH} characters, got {len(string)}")
    return tuple(strings)


def _logprobs(
    output: pb.OutputParams, name: Literal["logprobs", "prompt_logprobs"], vocabulary: int, bad: Violations
) -> int | None:
    if not output.HasField(name):
        return None
    wanted: int = getattr(output, name)
    return _number(f"output.{name}", wanted, Range(0, min(MAX_LOGPROBS, vocabulary)), bad)


def _ids(
    path: str, ids: Sequence[int], vocabulary: int, bad: Violations, most: int | None = None
) -> frozenset[int]:
    if most is not None and len(ids) > most:
        bad.add(path, f"must be at most {most} ids, got {len(ids)}")
        return frozenset()
    for index, token in enumerate(ids):
        if token >= vocabulary:
            bad.add(f"{path}[{index}]", f"token id must be in [0, {vocabulary - 1}], got {token}")
    return frozenset(ids)


def _number(path: str, value: Number, allowed: Range, bad: Violations) -> Number:
    if value not in allowed:
        bad.add(path, f"must be in {allowed}, got {value if isinstance(value, int) else format(value, 'g')}")
    return value


def _cut(text: str) -> str:
    """A client's text, quoted, short enough for a message."""
    return ascii(text if len(text) <= 64 else text[:61] + "...")
