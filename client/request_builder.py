"""Request builder: turns prompts and named options into request messages."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from npuserve.client.structured import CONSTRAINTS, set_constraint
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2, prompt_pb2, tokenize_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | pb.GenerateRequest
"""Prompt of a request, in one of four forms.

- A text.
- Token ids.
- A chat: its messages, each {"role": ..., "content": ...} with the other fields of npuserve.v1.Message. An item of
  `tool_calls` is a call of an answer, a mapping as in the OpenAI API, or its JSON text.
- A whole request, to which the options are added.
"""


ToolChoice = str | Mapping[str, Any] | prompt_pb2.ToolChoice
"""Tool choice: "auto", "none", "required", or a function as {"name": ...} or as in the OpenAI API."""
TEXTS = (str, bytes, bytearray, memoryview)
"""Sequences that are not accepted as lists of values."""


class PromptOptions(TypedDict, total=False):
    """Options of `generate` that the token ids of the prompt depend on."""

    model: str
    parse_special_tokens: bool
    # chat prompts only
    template_args: Mapping[str, Any]
    tools: Sequence[str | Mapping[str, Any]]
    tool_choice: ToolChoice


class TokenizeOptions(PromptOptions, total=False):
    """Fields of TokenizeRequest and Chat, by name."""

    add_special_tokens: bool


class SchedulingOptions(TypedDict, total=False):
    """Options of every call that computes."""

    request_id: str
    priority: int
    bypass_prefix_cache: bool
    cache_salt: str


class EmbedOptions(SchedulingOptions, total=False):
    """Fields of EmbedRequest and SchedulingParams, by name."""

    model: str
    prompt_name: str
    dimensions: int
    normalize: bool
    truncate: bool


class RankOptions(SchedulingOptions, total=False):
    """Fields of RankRequest and SchedulingParams, by name."""

    model: str
    instruction: str
    truncate: bool


class Options(PromptOptions, SchedulingOptions, total=False):
    """Fields of GenerateRequest and its nested messages, by name.

    generate.proto documents ranges and defaults. The server's default replaces an absent option. A `json_schema` is a
    text, a dict, or a model class, such as a subclass of pydantic.BaseModel; `structured.parsed` returns its instance.
    An option that is None counts as absent.
    """

    n: int
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    # stopping
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    # constraint, at most one of them
    json_schema: str | Mapping[str, Any] | type
    regex: str
    grammar: str
    choices: Sequence[str]
    json_object: bool
    structural_tag: str | Mapping[str, Any]
    # output
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    return_token_ids: bool
    parse_output: bool
    # scheduling of the answer
    speculate: bool


def build_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Return the request. The server checks whether its values are in range.

    Raise TypeError for an unknown option or a value of the wrong type. Raise ValueError for a value that its field
    cannot hold, such as a text with a lone surrogate. Each message begins with the option's name.
    """
    request = pb.GenerateRequest()
    with _named_errors("prompt"):
        _set_prompt(request, prompt)
    parts = [request, request.sampling, request.stopping, request.output, request.scheduling]
    if request.HasField("chat"):
        parts.append(request.chat)  # type: ignore[arg-type]
    constraints = [name for name, value in options.items() if name in CONSTRAINTS and value is not None]
    if len(constraints) > 1:
        raise TypeError(f"{constraints[1]}: cannot be combined with {constraints[0]}")
    for name, value in options.items():
        if name not in Options.__annotations__:
            raise TypeError(f"{name}: unknown option{_suggestion(name, Options)}")
        if value is None:
            continue
        part = next((part for part in parts if name in part.DESCRIPTOR.fields_by_name), None)
        if part is None:
            raise TypeError(f"{name}: needs a chat")
        with _named_errors(name):
            if name in CONSTRAINTS:
                set_constraint(request, name, value)
            else:
                _set_field(part, name, value)
    return request


def build_resume(resume_token: str, token_offset: int) -> pb.ResumeStreamRequest:
    """Return the request that resumes a stream. Raise TypeError or ValueError as `build_request` does."""
    request = pb.ResumeStreamRequest()
    with _named_errors("resume_token"):
        request.resume_token = resume_token
    with _named_errors("token_offset"):
        request.token_offset = token_offset
    return request


def build_tokenize(
    prompt: str | Sequence[Mapping[str, Any]], options: TokenizeOptions
) -> tokenize_pb2.TokenizeRequest:
    """Return the request for the token ids of a text or chat. Raise TypeError or ValueError as `build_request` does."""
    for name in options:
        if name not in TokenizeOptions.__annotations__:
            raise TypeError(f"{name}: not an option of tokenize{_suggestion(name, TokenizeOptions)}")
    shared: Any = {name: value for name, value in options.items() if name in PromptOptions.__annotations__}
    generate = build_request(prompt, shared)
    if isinstance(prompt, pb.GenerateRequest) or generate.HasField("token_ids"):
        raise TypeError("prompt: must be a text or a chat")
    with _named_errors("add_special_tokens"):
        request = tokenize_pb2.TokenizeRequest(add_special_tokens=options.get("add_special_tokens"))
    for field, value in generate.ListFields():
        if isinstance(value, prompt_pb2.Chat):
            request.chat.CopyFrom(value)
        else:
            setattr(request, field.name, value)
    return request


def build_detokenize(token_ids: Sequence[int]) -> tokenize_pb2.DetokenizeRequest:
    """Return the request for the text of token ids. Raise TypeError or ValueError as `build_request` does."""
    with _named_errors("token_ids"):
        return tokenize_pb2.DetokenizeRequest(token_ids=_sequence(token_ids))


def build_embed(content: str | Sequence[int], options: EmbedOptions) -> pooling_pb2.EmbedRequest:
    """Return the request for an embedding. Raise TypeError or ValueError as `build_request` does."""
    request = pooling_pb2.EmbedRequest()
    with _named_errors("content"):
        if isinstance(content, str):
            request.text = content
        else:
            request.token_ids.ids.extend(_sequence(content))
            request.token_ids.SetInParent()
    _set_options(request, options, EmbedOptions)
    return request


def build_rank(query: str, documents: Sequence[str], options: RankOptions) -> pooling_pb2.RankRequest:
    """Return the request for scores of documents. Raise TypeError or ValueError as `build_request` does."""
    request = pooling_pb2.RankRequest()
    with _named_errors("query"):
        request.query = query
    with _named_errors("documents"):
        request.documents.extend(_sequence(documents))
    _set_options(request, options, RankOptions)
    return request


def _set_options(
    request: pooling_pb2.EmbedRequest | pooling_pb2.RankRequest, options: SchedulingOptions,
    known: type[SchedulingOptions],
) -> None:
    for name, value in options.items():
        if name not in known.__annotations__:
            raise TypeError(f"{name}: unknown option{_suggestion(name, known)}")
        if value is not None:
            part = request if name in request.DESCRIPTOR.fields_by_name else request.scheduling
            with _named_errors(name):
                _set_field(part, name, value)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Put the name of an option or argument before the message of a TypeError or ValueError."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:  # includes UnicodeEncodeError, whose constructor takes no message
        raise ValueError(f"{name}: {error}") from None


def _suggestion(name: str, options: type[PromptOptions | SchedulingOptions]) -> str:
    """Return the end of a sentence that suggests the most similar option; "" if none is similar."""
    near = difflib.get_close_matches(str(name), options.__annotations__, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, pb.GenerateRequest):
        request.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        request.chat.messages.extend(_message(message) for message in prompt)  # type: ignore[arg-type]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, TEXTS):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    else:
        raise TypeError(f"must be a text, token ids, a chat or a request, got {type(prompt).__name__}")


def _message(fields: Mapping[str, Any]) -> prompt_pb2.Message:
    """Return a message of a chat, with its tool calls as JSON text."""
    content = fields.get("content")
    if content is not None and not isinstance(content, (str, bytes)):
        raise TypeError(f"content of a message must be a text, got {_described(content)}")
    calls = fields.get("tool_calls")
    if calls is None:
        return prompt_pb2.Message(**fields)
    return prompt_pb2.Message(**{**fields, "tool_calls": [_tool_call(call) for call in _sequence(calls)]})


def _described(content: object) -> str:
    """Return what content is that is no text, and what to send instead if it is a list of parts of the OpenAI API."""
    parts = content if isinstance(content, (list, tuple)) else ()
    kinds = [part["type"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("type"), str)]
    if not kinds or len(kinds) < len(parts):
        return type(content).__name__
    refused = next((kind for kind in kinds if kind != "text"), None)
    if refused is None:
        return "a list of parts: join the texts of the parts"
    return f"a part of the type {refused[:40]!r}: models are served for text only, so send the text without it"


def _tool_call(call: pb.ToolCall | Mapping[str, Any] | str) -> str:
    """Return a tool call as the JSON text of the OpenAI API."""
    if isinstance(call, pb.ToolCall):
        call = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return call if isinstance(call, str) else json.dumps(call, ensure_ascii=False)


def _tool_choice(value: ToolChoice) -> prompt_pb2.ToolChoice:
    if isinstance(value, prompt_pb2.ToolChoice):
        return value
    if isinstance(value, Mapping):
        function = value.get("function", value)
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise ValueError(f"must have the name of a function, got {value!r}")
        return prompt_pb2.ToolChoice(name=function["name"])
    known = prompt_pb2.ToolChoiceMode.keys()
    choices = "auto, none, required, or a mapping with the name of a function"
    if not isinstance(value, str):
        raise TypeError(f"must be {choices}, got {type(value).__name__}")
    mode = f"TOOL_CHOICE_MODE_{value.upper()}"
    if mode not in known:
        raise ValueError(f"must be {choices}, got {value!r}")
    return prompt_pb2.ToolChoice(mode=prompt_pb2.ToolChoiceMode.Value(mode))


def _set_field(part: Any, name: str, value: Any) -> None:
    """Set the field `name` of the message `part`. Raise TypeError or ValueError for an unsuitable value."""
    field = part.DESCRIPTOR.fields_by_name[name]
    if name == "tool_choice":
        part.tool_choice.CopyFrom(_tool_choice(value))
    elif name == "tools":
        tools = _sequence(value)
        part.tools.extend(tool if isinstance(tool, str) else json.dumps(tool, ensure_ascii=False) for tool in tools)
    elif name == "stop" and isinstance(value, str):
        part.stop.append(value)
    elif field.message_type is not None:  # a map or a Struct
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a mapping, got {type(value).__name__}")
        getattr(part, name).update(value)
    elif field.is_repeated:
        getattr(part, name).extend(_sequence(value))
    else:
        setattr(part, name, value)


def _sequence(value: Any) -> Sequence[Any]:
    """Return `value`. Raise TypeError unless it is a sequence other than a text."""
    if not isinstance(value, Sequence) or isinstance(value, TEXTS):
        raise TypeError(f"must be a sequence, got {type(value).__name__}")
    return value
