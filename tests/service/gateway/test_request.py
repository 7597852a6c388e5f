"""Translation of VllmEngine's requests: what each value means, above all 0."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.npu.step import SamplingParams
from npuserve.service.errors import InvalidField, Reserved
from npuserve.service.gateway.fields import client_paths
from npuserve.service.gateway.request import REQUEST_FIELDS, SAMPLING_FIELDS, translate
from npuserve.service.requests import validation
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.text.model_folder import ModelFolder, open_folder
from tests.support.fake_engine import EOS, INFO, make_folder
from tests.support.vllm_engine import like_smg, vllm_request

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25}


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """Model with a default of every sampling parameter."""
    path = make_folder(tmp_path / "m", **DEFAULTS)
    return open_folder(path, str(path), "counting")


def check(request: vllm.GenerateRequest, folder: ModelFolder) -> CheckedRequest:
    message = translate(request, INFO)
    return validation.check(message, folder, INFO, validation.request_id(message), 0.0)


def sampling(folder: ModelFolder, **fields: object) -> SamplingParams:
    return check(vllm_request([1], **fields), folder).request.sampling  # type: ignore[arg-type]


def test_translate_of_a_request_without_parameters_has_the_models_defaults(folder: ModelFolder) -> None:
    empty = vllm.SamplingParams()
    for request in (vllm.GenerateRequest(text="ab"), vllm.GenerateRequest(text="ab", sampling_params=empty)):
        checked = check(request, folder)
        found = checked.request.sampling
        assert {name: pytest.approx(getattr(found, name)) for name in DEFAULTS} == DEFAULTS
        assert (found.presence_penalty, found.frequency_penalty, found.logit_bias) == (0, 0, {})
        assert (found.logprobs, found.prompt_logprobs, found.min_tokens) == (None, None, 0)
        assert checked.request.max_tokens == INFO.max_model_len - 2
        assert checked.request.eos_token_ids == {EOS}
        assert (checked.stop, checked.return_token_ids) == ((), True)


@pytest.mark.parametrize(("name", "off"), [("top_k", 0), ("min_p", 0)])
def test_translate_zero_beside_a_top_p_is_off(folder: ModelFolder, name: str, off: float) -> None:
    assert getattr(sampling(folder), name) == DEFAULTS[name]
    assert getattr(sampling(folder, top_p=1.0), name) == off
    assert getattr(sampling(folder, **{name: 0.5 if name == "min_p" else 7}), name) == (0.5 if name == "min_p" else 7)


def test_translate_largest_top_k_is_off(folder: ModelFolder) -> None:
    assert sampling(folder, top_k=2**31 - 1).top_k == 0


def test_translate_of_smgs_fields_takes_all_of_them(folder: ModelFolder) -> None:
    """smg has merged the model's defaults, so every value in its request is meant."""
    found = check(like_smg([1], temperature=0.0), folder).request.sampling
    assert (found.temperature, found.top_p, found.top_k, found.min_p, found.repetition_penalty) == (0.0, 1.0, 0, 0, 1.0)


def test_translate_passes_every_field(folder: ModelFolder) -> None:
    request = vllm_request(
        [5, 6], 9, request_id="a-1", temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=2.0, seed=7, logit_bias={0: 1.5, 3: -100.0}, min_tokens=2,
        stop=["x", "yz"], stop_token_ids=[4, 8], include_stop_str_in_output=True, logprobs=0, prompt_logprobs=20,
        skip_special_tokens=True, spaces_between_special_tokens=True, ignore_eos=True, n=1, data_parallel_rank=-1)
    request.tokenized.original_text = "not read"
    message = translate(request, INFO)
    assert (message.request_id, message.n) == ("a-1", 1)
    checked = check(request, folder)
    assert checked.request.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=2.0, seed=7, logit_bias={0: 1.5, 3: -100.0}, min_tokens=2, ending_ids=(4, 8), logprobs=0,
        prompt_logprobs=20)
    request_part = checked.request
    assert (request_part.prompt_ids, request_part.max_tokens) == ([5, 6], 9)
    assert (request_part.stop_token_ids, request_part.eos_token_ids) == ({4, 8}, frozenset())
    assert checked == CheckedRequest(request_part, ("x", "yz"), False, True, True)


@pytest.mark.parametrize("is_skipped", [True, False])
def test_translate_passes_skip_special_tokens(folder: ModelFolder, is_skipped: bool) -> None:
    """A stop string may be the text of a special token."""
    assert check(vllm_request([5], 9, skip_special_tokens=is_skipped), folder).skip_special_tokens is is_skipped


@pytest.mark.parametrize(("given", "taken"), [(0, 0), (7, 7), (-1, 2**64 - 1), (-(2**31), 2**64 - 2**31)])
def test_translate_takes_seeds_as_twos_complement(folder: ModelFolder, given: int, taken: int) -> None:
    assert sampling(folder, seed=given).seed == taken


def test_translate_without_a_seed_draws_one(folder: ModelFolder) -> None:
    assert len({sampling(folder).seed for _ in range(8)}) == 8


@pytest.mark.parametrize(("fields", "message"), [
    ({"logprobs": -1}, "sampling_params.logprobs: must be in [0, 20], got -1"),
    ({"prompt_logprobs": -1}, "sampling_params.prompt_logprobs: must be in [0, 20], got -1"),
    ({"logit_bias": {-5: 1.0}}, "sampling_params.logit_bias[-5]: token id must be in [0, 299], got -5"),
    ({"top_k": 2**31}, "sampling_params.top_k: must be in [0, 2147483647], got 2147483648"),
    ({"data_parallel_rank": 1}, "data_parallel_rank: must be in [-1, 0], got 1"),
])
def test_translate_of_a_value_that_ours_cannot_hold_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidField) as refused:
        translate(vllm_request([1], **fields), INFO)  # type: ignore[arg-type]
    assert refused.value.message == message


def test_translate_names_several_bad_fields() -> None:
    request = vllm.GenerateRequest(data_parallel_rank=3)
    request.sampling_params.logprobs = -2
    with pytest.raises(InvalidField) as refused:
        translate(request, INFO)
    assert [path for path, _ in refused.value.violations] == ["data_parallel_rank", "input", "sampling_params.logprobs"]


@pytest.mark.parametrize("count", [64, 1_000_000])
def test_translate_of_too_many_ids_is_refused_before_they_are_copied(count: int) -> None:
    request = vllm_request([1] * count)
    with pytest.raises(InvalidField, match=rf"^tokenized.input_ids: {count} tokens of prompt are too many"):
        translate(request, msgspec.structs.replace(INFO, max_model_len=64))


UNKNOWN = {
    "mm_inputs": vllm.GenerateRequest(text="a", mm_inputs=vllm.MultimodalInputs()),
    "extra_mm_inputs": vllm.GenerateRequest(text="a", extra_mm_inputs=[vllm.MultimodalInputs()]),
    "media_refs": vllm.GenerateRequest(text="a", media_refs=vllm.MediaRefs()),
    "kv_transfer_params": vllm.GenerateRequest(text="a", kv_transfer_params=vllm.KvTransferParams()),
    "kv_transfer_params_json": vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"),
    "sampling_params.truncate_prompt_tokens": vllm_request("a", truncate_prompt_tokens=-1),
}


@pytest.mark.parametrize("field", UNKNOWN)
def test_translate_of_an_unknown_field_is_unimplemented(field: str) -> None:
    with pytest.raises(Reserved) as refused:
        translate(UNKNOWN[field], INFO)
    if field.endswith("mm_inputs"):
        reason = "models are served for text only; send the chat without images and videos"
    else:
        reason = "reserved, not implemented in this version"
    assert refused.value.message == f"{field}: {reason}"


def test_translate_knows_or_refuses_every_field_of_the_stubs() -> None:
    request = set(vllm.GenerateRequest.DESCRIPTOR.fields_by_name)
    params = set(vllm.SamplingParams.DESCRIPTOR.fields_by_name)
    assert request >= REQUEST_FIELDS
    assert params >= SAMPLING_FIELDS
    refused = {field.rpartition(".")[2] for field in UNKNOWN}
    assert (request - REQUEST_FIELDS) | (params - SAMPLING_FIELDS) == refused


@pytest.mark.parametrize(("fields", "ours"), [
    ({"json_schema": "{}"}, {"json_schema": "{}"}), ({"regex": "a*"}, {"regex": "a*"}),
    ({"grammar": "x"}, {"grammar": "x"}), ({"json_object": True}, {"json_object": True}),
    ({"json_object": False}, {"json_object": False}), ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
])
def test_translate_passes_constraints(fields: dict[str, object], ours: dict[str, object]) -> None:
    message = translate(vllm_request("a", **fields), INFO)  # type: ignore[arg-type]
    assert {message.WhichOneof("constraint"): getattr(message, message.WhichOneof("constraint"))} == ours


def test_translate_passes_choices() -> None:
    request = vllm_request("a")
    request.sampling_params.choice.choices.extend(["yes", "no"])
    assert list(translate(request, INFO).choices.choices) == ["yes", "no"]


def test_check_of_a_constraint_is_that_of_inference_service(folder: ModelFolder) -> None:
    request = vllm_request("a", json_schema='{"type":"object"}', grammar_from_first_token=True)
    assert check(request, folder).request.constraint == Constraint("json_schema", '{"type":"object"}')
    assert check(vllm_request("a", json_object=False), folder).request.constraint is None
    empty = vllm_request("a")
    empty.sampling_params.choice.SetInParent()
    with pytest.raises(InvalidField, match=r"^sampling_params.choice.choices: must be 1 to 1024"), client_paths():
        check(empty, folder)
