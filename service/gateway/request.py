"""Translation of VllmEngine's GenerateRequest to InferenceService's, whose checks then apply to it.

proto3 scalars without `optional` cannot be absent. `translate` leaves a field absent where 0 means the model's default;
docs/vllm-engine.md lists the meaning of 0 for each field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.npu.profile import MAX_PROFILE_STEPS
from npuserve.service.errors import InvalidField, Reserved, Violations
from npuserve.service.ipc.messages import ModelInfo
from npuserve.service.requests.fields import (
    MAX_LOGPROBS,
    check_number,
    check_profile_name,
    check_profile_steps,
    check_token_ids,
)
from npuserve.service.requests.prompt import too_many_tokens
from npuserve.service.text.model_folder import DEFAULT_RANGES, Range
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARACTERS = 512
"""smg makes an id from the client's `X-Request-Id` and a UUID."""
REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"})
SAMPLING_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
    "ignore_eos", "n", "logprobs", "prompt_logprobs", "seed", "include_stop_str_in_output", "logit_bias",
    "grammar_from_first_token", "json_schema", "regex", "grammar", "json_object", "choice", "structural_tag",
})
"""Fields that are honoured, and fields that cannot change an answer of token ids. Any other field that a client sets is
UNIMPLEMENTED, also one that a later version of the stubs adds."""
EMBED_FIELDS = frozenset({"request_id", "tokenized"})
MEDIA_FIELDS = frozenset({"mm_inputs", "extra_mm_inputs"})
"""Fields of images, videos and audio, which also stand for the placeholders of the prompt."""
_MAX_SEED = (1 << 64) - 1
_TOP_K = Range(0, DEFAULT_RANGES["top_k"].high)


def translate(request: vllm.GenerateRequest, info: ModelInfo) -> pb.GenerateRequest:
    """Return the request as a message of InferenceService.

    Raises InvalidField for values that the other message cannot hold, and Reserved for fields without a counterpart.
    """
    params = request.sampling_params
    _check_known(request, REQUEST_FIELDS, "")
    _check_known(params, SAMPLING_FIELDS, "sampling_params.")
    bad = Violations()
    check_number("data_parallel_rank", request.data_parallel_rank, Range(-1, 0), bad)
    translated = pb.GenerateRequest()
    if request.request_id:
        translated.request_id = request.request_id
    if params.n:
        translated.n = params.n
    with bad.collect():
        _set_prompt(translated, request, info.max_model_len)
    _set_sampling(translated.sampling, params, info.vocabulary_size, bad)
    _set_stopping(translated.stopping, params)
    _set_output(translated.output, params, info.vocabulary_size, bad)
    _set_constraint(translated, params)
    bad.check()
    return translated


def translate_embed(
    request: vllm.EmbedRequest, tokenizer: Tokenizer | None, vocabulary_size: int
) -> pooling_pb2.EmbedRequest:
    """Return the request as a message of InferenceService.

    A gateway tokenizes without the special tokens of the model's tokenizer, such as an end-of-text token. Those that
    are missing are added.

    Raises Reserved for fields without a counterpart, and InvalidField for ids that are absent or not the model's.
    """
    _check_known(request, EMBED_FIELDS, "")
    ids = list(request.tokenized.input_ids)
    if not ids:
        raise InvalidField("tokenized.input_ids", "must be at least one token, got an empty input")
    bad = Violations()
    check_token_ids("tokenized.input_ids", ids, vocabulary_size, bad)
    bad.check()
    head, tail = tokenizer.special_ids_around if tokenizer else ([], [])
    translated = pooling_pb2.EmbedRequest()
    if request.request_id:
        translated.request_id = request.request_id
    if ids[: len(head)] != head:
        translated.token_ids.ids.extend(head)
    translated.token_ids.ids.extend(ids)
    if tail and ids[-len(tail) :] != tail:
        translated.token_ids.ids.extend(tail)
    return translated


def translate_profile(request: common_pb2.StartProfileRequest) -> tuple[str, int]:
    """Return name and steps of a profile. Raises InvalidField, and Reserved for fields that would have no effect.

    `activities` has none: all activities that the device has are recorded. Without `num_steps` a gateway calls
    StopProfile later, and the profile has the largest bound.
    """
    for field in ("start_step", "with_stack", "record_shapes", "profile_by_stage"):
        if getattr(request, field):
            raise Reserved(field)
    name = check_profile_name("output_dir", request.output_dir) if request.output_dir else ""
    if not request.HasField("num_steps"):
        return name, MAX_PROFILE_STEPS
    return name, check_profile_steps("num_steps", request.num_steps)


def _check_known(message: Message, known: frozenset[str], path: str) -> None:
    """Raise Reserved for a field that is set and not known."""
    for field, _ in message.ListFields():
        if field.name in MEDIA_FIELDS:
            raise Reserved(
                path + field.name, "models are served for text only; send the chat without images and videos")
        if field.name not in known:
            raise Reserved(path + field.name)


def _set_prompt(translated: pb.GenerateRequest, request: vllm.GenerateRequest, max_model_len: int) -> None:
    match request.WhichOneof("input"):
        case "text":
            translated.text = request.text
        case "tokenized":
            ids = request.tokenized.input_ids
            if len(ids) >= max_model_len:  # before they are copied
                raise InvalidField("tokenized.input_ids", too_many_tokens(len(ids), max_model_len))
            translated.token_ids.SetInParent()
            translated.token_ids.ids.extend(ids)
        case _:
            raise InvalidField("input", "one of tokenized and text is needed")


def _set_sampling(sampling: pb.SamplingParams, params: Any, vocabulary_size: int, bad: Violations) -> None:
    """Set the parameters of sampling.

    top_p, top_k and min_p belong together: a client that sets a top_p has set all three, so their zeros mean "off".
    Without a top_p they mean the model's defaults.
    """
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p:
        sampling.top_p = params.top_p
    if params.top_k > _TOP_K.high:
        check_number("sampling_params.top_k", params.top_k, _TOP_K, bad)
    elif params.top_k or params.top_p:
        sampling.top_k = params.top_k
    if params.min_p or params.top_p:
        sampling.min_p = params.min_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    sampling.presence_penalty = params.presence_penalty
    sampling.frequency_penalty = params.frequency_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed & _MAX_SEED
    for token, bias in params.logit_bias.items():
        if token < 0:
            path = f"sampling_params.logit_bias[{token}]"
            bad.add(path, f"token id must be in [0, {vocabulary_size - 1}], got {token}")
        else:
            sampling.logit_bias[token] = bias


def _set_stopping(stopping: pb.StoppingParams, params: Any) -> None:
    if params.HasField("max_tokens"):
        stopping.max_tokens = params.max_tokens
    stopping.min_tokens = params.min_tokens
    stopping.stop.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos


def _set_output(output: pb.OutputParams, params: Any, vocabulary_size: int, bad: Violations) -> None:
    output.return_token_ids = True
    output.skip_special_tokens = params.skip_special_tokens
    allowed = Range(0, min(MAX_LOGPROBS, vocabulary_size))
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and check_number(f"sampling_params.{name}", getattr(params, name), allowed, bad) >= 0:
            setattr(output, name, getattr(params, name))


def _set_constraint(translated: pb.GenerateRequest, params: Any) -> None:
    match params.WhichOneof("constraint"):
        case None:
            return
        case "choice":
            translated.choices.choices.extend(params.choice.choices)
            translated.choices.SetInParent()
        case kind:
            setattr(translated, kind, getattr(params, kind))
