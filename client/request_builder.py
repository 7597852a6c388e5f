"""Request builder: turns prompts and named options into request messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2, tokenize_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | pb.GenerateRequest
"""Prompt of a request, in one of four forms.

- A text.
- Token ids.
- A chat: its messages, each {"role": ..., "content": ...} with the other fields of npuserve.v1.Message.
- A whole request, to which the options are added.
"""


class Options(TypedDict, total=False):
    """Fields of GenerateRequest and its nested messages, by name.

    generate.proto documents ranges and defaults. The server's default replaces an absent option.
    """

    request_id: str
    model: str
    n: int
    parse_special_tokens: bool
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
    # output
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    return_token_ids: bool
    # scheduling
    priority: int
    bypass_prefix_cache: bool
    cache_salt: str
    # chat prompts only
    template_args: Mapping[str, Any]
    tools: Sequence[str]


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
    for name, value in options.items():
        part = next((part for part in parts if name in part.DESCRIPTOR.fields_by_name), None)
        if part is None or name not in Options.__annotations__:
            raise TypeError(f"{name}: is no option" + (" without a chat" if name in ("template_args", "tools") else ""))
        with _named_errors(name):
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


def build_tokenize(prompt: str | Sequence[Mapping[str, Any]]) -> tokenize_pb2.TokenizeRequest:
    """Return the request for the token ids of a text or chat. Raise TypeError or ValueError as `build_request` does."""
    request = build_request(prompt, {})
    if request.HasField("token_ids"):
        raise TypeError("prompt: must be a text or a chat")
    if isinstance(prompt, str):
        return tokenize_pb2.TokenizeRequest(text=request.text)
    return tokenize_pb2.TokenizeRequest(chat=request.chat)


def build_detokenize(token_ids: Sequence[int]) -> tokenize_pb2.DetokenizeRequest:
    """Return the request for the text of token ids. Raise TypeError or ValueError as `build_request` does."""
    with _named_errors("token_ids"):
        return tokenize_pb2.DetokenizeRequest(token_ids=token_ids)


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Put the name of an option or argument before the message of a TypeError or ValueError."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:  # includes UnicodeEncodeError, whose constructor takes no message
        raise ValueError(f"{name}: {error}") from None


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, pb.GenerateRequest):
        request.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        request.chat.messages.extend(prompt_pb2.Message(**message) for message in prompt)  # type: ignore[arg-type]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    else:
        raise TypeError(f"must be a text, token ids, a chat or a request, got {type(prompt).__name__}")


def _set_field(part: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        getattr(part, name).update(value)
    elif name == "stop" and isinstance(value, str):
        part.stop.append(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        getattr(part, name).extend(value)
    else:
        setattr(part, name, value)
