"""What is asked: a prompt and named options to one GenerateRequest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2, tokenize_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | pb.GenerateRequest
"""A text; token ids; a chat as its messages, each {"role": ..., "content": ...} with the other fields of
npuserve.v1.Message; or a whole request, to which the options are added."""


class Options(TypedDict, total=False):
    """Fields of GenerateRequest and of its parts by their own names; ranges and defaults stand in generate.proto. An
    absent one takes the server's default."""

    request_id: str
    model: str
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
    # a chat's own
    template_args: Mapping[str, Any]
    tools: Sequence[str]


def build(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Return the request; the server checks whether its values are in range.

    Raise TypeError for an unknown option or a value of another type, ValueError for a value that its field cannot hold,
    such as a text with a lone surrogate. The message begins with the option's name.
    """
    request = pb.GenerateRequest()
    with _naming("prompt"):
        _set_prompt(request, prompt)
    homes = [request, request.sampling, request.stopping, request.output, request.scheduling]
    if request.HasField("chat"):
        homes.append(request.chat)  # type: ignore[arg-type]
    for name, value in options.items():
        home = next((home for home in homes if name in home.DESCRIPTOR.fields_by_name), None)
        if home is None or name not in Options.__annotations__:
            raise TypeError(f"{name}: is no option" + (" without a chat" if name in ("template_args", "tools") else ""))
        with _naming(name):
            _set(home, name, value)
    return request


def resuming(resume_token: str, token_offset: int) -> pb.ResumeStreamRequest:
    """Return the request that resumes a stream. Raise TypeError or ValueError as `build` does."""
    request = pb.ResumeStreamRequest()
    with _naming("resume_token"):
        request.resume_token = resume_token
    with _naming("token_offset"):
        request.token_offset = token_offset
    return request


def detokenizing(token_ids: Sequence[int]) -> tokenize_pb2.DetokenizeRequest:
    """Return the request for the text of ids. Raise TypeError or ValueError as `build` does."""
    with _naming("token_ids"):
        return tokenize_pb2.DetokenizeRequest(token_ids=token_ids)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the name of an option or argument before the message of a TypeError or ValueError."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except ValueError as error:  # a UnicodeEncodeError is one, and cannot be made of a message
        raise ValueError(f"{name}: {error}") from None


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, pb.GenerateRequest):
        request.CopyFrom(prompt)
    elif isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(turn, Mapping) for turn in prompt):
        request.chat.messages.extend(prompt_pb2.Message(**turn) for turn in prompt)  # type: ignore[arg-type]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    else:
        raise TypeError(f"must be a text, token ids, a chat or a request, got {type(prompt).__name__}")


def _set(home: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        getattr(home, name).update(value)
    elif name == "stop" and isinstance(value, str):
        home.stop.append(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        getattr(home, name).extend(value)
    else:
        setattr(home, name, value)
