"""Validation of requests: protobuf messages to the engine's `Request`. No field is ignored silently.

Pure functions. Bad fields are collected in errors.Violations: one InvalidField names each by its path in the message
and gives the allowed range.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from npuserve.npu.model.pooling import Task
from npuserve.npu.step import SamplingParams
from npuserve.service.config import MAX_SAMPLES, PRIORITY_RANGE
from npuserve.service.errors import InvalidField, ModelNotFound, NoTokenizer, Violations, WrongTask, quoted
from npuserve.service.ipc.messages import ModelInfo, Request
from npuserve.service.parsing.parameter_types import FunctionTypes
from npuserve.service.parsing.tool_choice import call_types, check_parsing, constrained_format, tool_constraint
from npuserve.service.requests.fields import (
    check_lengths,
    check_number,
    check_sampling,
    check_stopping,
    check_token_ids,
)
from npuserve.service.requests.prompt import check_length, encode, prompt_text, prompt_token_ids
from npuserve.service.structured_output.validation import check_constraint
from npuserve.service.text.answer_format import PLAIN, AnswerFormat
from npuserve.service.text.model_folder import ModelFolder, Range
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2, tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

PRIORITY = Range(*PRIORITY_RANGE)
MAX_REQUEST_ID_CHARACTERS = 128
"""Default of Policy.max_request_id_characters."""
MAX_CACHE_SALT_CHARACTERS = 128
MAX_UNARY_BYTES = 4 << 20
"""Size limit of a received message in gRPC clients, by default."""
BYTES_PER_LOGPROB = 24
"""Estimated size of a serialized TokenLogprob: 2 of header, 4 of id, 5 of logprob, 4 of rank, 2 + 7 of text."""

_CALLS: dict[Task, str] = {"generate": "Generate", "embed": "Embed", "rank": "Rank"}
_KINDS: dict[Task, str] = {
    "generate": "generates text: it has no modules.json, which says how an embedding model or a reranker pools (a "
                "reranker without it is served with task set to rank)",
    "embed": "is an embedding model", "rank": "is a reranker",
}


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request.

    request: the engine's part. With several samples it is the first one's; frontend/samples.py makes the others.
    stop, include_stop, skip_special_tokens, return_token_ids: the front end's part, for the answer.
    has_text: whether the answer contains text. Without it, token ids are not decoded.
    answer_format: format by which the answer is parsed; PLAIN: it is not.
    call_id: beginning of the ids of tool calls.
    call_types: types of the parameters of the tools; empty unless the format has tagged arguments.
    """

    request: Request
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    has_text: bool = True
    answer_format: AnswerFormat = PLAIN
    call_id: str = ""
    call_types: dict[str, FunctionTypes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and defaults of the server, of the caller's key and of the service that is called.

    priorities: range of a request's priority.
    plain_content: see ServerConfig.
    max_requests: concurrent requests of the caller; 0 for no limit.
    max_request_id_characters: maximum length of a request id.
    """

    priorities: Range = PRIORITY
    plain_content: bool = True
    max_requests: int = 0
    max_request_id_characters: int = MAX_REQUEST_ID_CHARACTERS


Named = pb.GenerateRequest | pooling_pb2.EmbedRequest | pooling_pb2.RankRequest
"""Requests with a request id."""


def request_id(message: Named, max_characters: int = MAX_REQUEST_ID_CHARACTERS) -> str:
    """Return the client's request id, or a new one if it is absent or not valid as metadata, which `check` refuses."""
    given = message.request_id
    is_valid = 1 <= len(given) <= max_characters and all("!" <= c <= "~" for c in given)
    return given if is_valid else uuid.uuid4().hex


def check_model(
    message: Named | tokenize_pb2.TokenizeRequest | tokenize_pb2.DetokenizeRequest, folder: ModelFolder
) -> None:
    """Raise ModelNotFound if a request names another model than the served one."""
    if message.HasField("model") and message.model not in folder.names:
        raise ModelNotFound(f"model: {quoted(message.model)} is not served here; this server serves {folder.name!r}")


def task_of(folder: ModelFolder) -> Task:
    """Return what the served model is for."""
    return folder.pooling.task if folder.pooling else "generate"


def check_task(folder: ModelFolder, task: Task) -> None:
    """Raise WrongTask if the served model is for another task."""
    served = task_of(folder)
    if served != task:
        raise WrongTask(f"{_CALLS[task]}: the served model {folder.name!r} {_KINDS[served]}; call {_CALLS[served]}")


def check(
    message: pb.GenerateRequest,
    folder: ModelFolder,
    info: ModelInfo,
    name: str,
    arrival: float,
    policy: Policy = Policy(),
) -> CheckedRequest:
    """Check the whole request and tokenize its prompt.

    name: the result of `request_id`.
    arrival: time.monotonic() seconds.

    Raises InvalidField with all bad fields, ModelNotFound, WrongTask, NoTokenizer, NoChatTemplate, UnknownAnswerFormat.
    """
    check_model(message, folder)
    check_task(folder, "generate")
    bad = Violations()
    check_request_id(message, name, policy, bad)
    answer_format = check_parsing(message, folder.tokenizer, bad)
    samples = _check_samples(message, info, policy, bad)
    vocabulary_size = info.vocabulary_size
    output = message.output
    stopping = check_stopping(message.stopping, folder, vocabulary_size, bad)
    ending_ids = stopping.token_ids | stopping.eos_token_ids
    sampling = check_sampling(message, folder.defaults, vocabulary_size, bad)
    priority = check_scheduling(message.scheduling, policy, bad)
    constraint = check_constraint(message, folder, bad)
    allowed = sampling["allowed_token_ids"]
    if message.stopping.min_tokens and allowed and ending_ids.issuperset(allowed):
        bad.add("sampling.allowed_token_ids", "must hold a token that does not end the answer, for stopping.min_tokens")
    prompt_ids: list[int] = []
    with bad.collect():
        prompt_ids = prompt_token_ids(message, folder.tokenizer, info, policy.plain_content)
    if message.WhichOneof("prompt") == "chat":  # other prompts have neither reasoning nor tools
        answer_format = constrained_format(answer_format, constraint, folder.tokenizer, prompt_ids)
        constraint = constraint or tool_constraint(message, folder.tokenizer, prompt_ids, bad)
    max_tokens, min_tokens = check_lengths(message.stopping, len(prompt_ids), info.max_model_len, bad)
    bad.check()
    request = Request(
        name, prompt_ids, max_tokens, arrival,
        sampling=SamplingParams(
            **sampling, min_tokens=min_tokens,
            ending_ids=tuple(sorted(token for token in ending_ids if token < vocabulary_size))),
        stop_token_ids=stopping.token_ids, eos_token_ids=stopping.eos_token_ids, priority=priority,
        bypass_prefix_cache=message.scheduling.bypass_prefix_cache, cache_salt=message.scheduling.cache_salt,
        samples=samples, constraint=constraint,
        speculate=message.scheduling.speculate if message.scheduling.HasField("speculate") else True)
    skip = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
    return CheckedRequest(
        request, stopping.strings, message.stopping.include_stop, skip, output.return_token_ids,
        answer_format=answer_format, call_id=uuid.uuid4().hex[:16] if answer_format else "",
        call_types=call_types(message.chat, answer_format))


def check_request_id(message: Named, name: str, policy: Policy, bad: Violations) -> None:
    """Report a request id that is not valid. name: the result of `request_id`."""
    if message.HasField("request_id") and message.request_id != name:
        bad.add("request_id", (
            f"must be 1 to {policy.max_request_id_characters} printable ASCII characters without spaces, "
            f"got {quoted(message.request_id)}"))


def check_scheduling(scheduling: pb.SchedulingParams, policy: Policy, bad: Violations) -> int:
    """Return the priority, by default the one next to 0 that the policy allows; report bad fields."""
    lowest, highest, _ = policy.priorities
    default = int(min(max(0, lowest), highest))
    priority = scheduling.priority if scheduling.HasField("priority") else default
    check_number("scheduling.priority", priority, policy.priorities, bad)
    if len(scheduling.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        bad.add(
            "scheduling.cache_salt",
            f"must be at most {MAX_CACHE_SALT_CHARACTERS} characters, got {len(scheduling.cache_salt)}")
    return priority


def _check_samples(message: pb.GenerateRequest, info: ModelInfo, policy: Policy, bad: Violations) -> int:
    """Return the number of samples; report one that is out of range or that the queue could never take."""
    samples = message.n if message.HasField("n") else 1
    max_samples = min(MAX_SAMPLES, info.max_num_seqs + info.max_queue, policy.max_requests or MAX_SAMPLES)
    if not 1 <= samples <= max_samples:
        why = ""
        if max_samples < MAX_SAMPLES:
            why = f", since a sample is a request, and at most {max_samples} may be live at a time"
        bad.add("n", f"must be in [1, {max_samples}]{why}, got {samples}")
    return samples


def check_unary_size(request: Request, bytes_per_logprob: int = BYTES_PER_LOGPROB, bytes_per_token: int = 0) -> None:
    """Raise InvalidField if log-probabilities alone exceed the message size limit of most clients.

    The prompt's are counted once, and those of the first `min_tokens` tokens of each sample, since a call has no fewer.

    request: its `samples` are in one message.
    bytes_per_token: estimated size of a token without its log-probabilities.
    """
    fit = f"the answer must fit {MAX_UNARY_BYTES >> 20} MiB, the largest message that clients take by default: "
    sampling = request.sampling
    size = 0
    if sampling.prompt_logprobs is not None:
        token_bytes = bytes_per_token + bytes_per_logprob * (sampling.prompt_logprobs + 1)
        size = len(request.prompt_ids) * token_bytes
        if size > MAX_UNARY_BYTES:
            raise InvalidField(
                "output.prompt_logprobs",
                f"{fit}at most {MAX_UNARY_BYTES // token_bytes} tokens of prompt with {sampling.prompt_logprobs} "
                f"log-probabilities each, got {len(request.prompt_ids)}; StreamGenerate has no such limit")
    if sampling.logprobs is not None:
        token_bytes = request.samples * (bytes_per_token + bytes_per_logprob * (sampling.logprobs + 1))
        max_tokens = (MAX_UNARY_BYTES - size) // token_bytes
        if sampling.min_tokens > max_tokens:
            raise InvalidField(
                "output.logprobs",
                f"{fit}at most {max_tokens} tokens of each sample with {sampling.logprobs} log-probabilities each, but "
                f"min_tokens is {sampling.min_tokens}; StreamGenerate has no such limit")


def tokenize(
    message: tokenize_pb2.TokenizeRequest, tokenizer: Tokenizer | None, max_model_len: int, plain_content: bool = True
) -> tokenize_pb2.TokenizeResponse:
    """Return the response of a Tokenize call, with the same ids as `check` of the same prompt. Slow for long texts.

    plain_content: see ServerConfig.

    Raises InvalidField for a text of more than max_model_len tokens.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidField("prompt", "one of text and chat is needed")
    prompt = prompt_text(message, tokenizer, plain_content, max_model_len)
    check_length(prompt.text, kind, tokenizer, max_model_len)
    special = message.add_special_tokens if message.HasField("add_special_tokens") else kind == "text"
    ids = encode(prompt, kind, tokenizer, special)
    if len(ids) > max_model_len:
        raise InvalidField(kind, f"{len(ids)} tokens are too many; max_model_len is {max_model_len}")
    return tokenize_pb2.TokenizeResponse(token_ids=ids, text=prompt.text if kind == "chat" else "")


def detokenize(
    message: tokenize_pb2.DetokenizeRequest, tokenizer: Tokenizer | None, vocabulary_size: int, max_model_len: int
) -> str:
    """Return the text of a Detokenize call. Raise InvalidField for more than max_model_len ids."""
    if tokenizer is None:
        raise NoTokenizer("token_ids: the served model has no tokenizer")
    if len(message.token_ids) > max_model_len:
        raise InvalidField(
            "token_ids", f"{len(message.token_ids)} ids are too many; max_model_len is {max_model_len}")
    bad = Violations()
    check_token_ids("token_ids", message.token_ids, vocabulary_size, bad)
    bad.check()
    return tokenizer.decode(list(message.token_ids), message.skip_special_tokens)
