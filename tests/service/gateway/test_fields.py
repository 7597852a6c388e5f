"""Names of fields in errors."""

from __future__ import annotations

import pytest

from npuserve.service.errors import DuplicateRequest, InvalidField, NoTokenizer, QueueFull, ServeError
from npuserve.service.gateway.fields import NAMES, client_path, client_paths
from npuserve.v1 import generate_pb2 as pb


@pytest.mark.parametrize(("ours", "theirs"), [
    ("sampling.top_p", "sampling_params.top_p"), ("stopping.stop[3]", "sampling_params.stop[3]"),
    ("output.logprobs", "sampling_params.logprobs"), ("token_ids.ids[7]", "tokenized.input_ids[7]"),
    ("token_ids", "tokenized.input_ids"), ("sampling.logit_bias[300]", "sampling_params.logit_bias[300]"),
    ("n", "sampling_params.n"), ("choices", "sampling_params.choice"),
    ("choices.choices[2]", "sampling_params.choice.choices[2]"), ("structural_tag", "sampling_params.structural_tag"),
    ("prompt", "input"), ("text", "text"),
    ("request_id", "request_id"), ("name", "name"), ("nothing[1]", "nothing[1]"),
])
def test_client_path(ours: str, theirs: str) -> None:
    assert client_path(ours) == theirs


def test_names_are_fields_of_ours() -> None:
    fields = pb.GenerateRequest.DESCRIPTOR
    known = {*fields.fields_by_name, *fields.oneofs_by_name, "token_ids.ids"}
    assert set(NAMES) <= known


def test_client_paths_drops_a_hint_on_another_method() -> None:
    with pytest.raises(InvalidField) as renamed, client_paths():
        raise InvalidField("output.prompt_logprobs", "too many, got 9; StreamGenerate has no such limit")
    assert renamed.value.message == "sampling_params.prompt_logprobs: too many, got 9"


def test_client_paths_renames_all_violations_and_keeps_the_omitted() -> None:
    others = [(f"stopping.stop[{i}]", "must be 1 to 1024 characters, got 0") for i in range(200)]
    with pytest.raises(InvalidField) as renamed, client_paths():
        raise InvalidField("sampling.top_p", "must be in (0, 1], got 2", *others)
    error = renamed.value
    assert error.field == "sampling_params.top_p"
    assert error.violations[1][0] == "sampling_params.stop[0]"
    assert len(error.violations) + error.omitted == 201
    assert error.message.endswith(f"; and {error.omitted} more")


@pytest.mark.parametrize(("error", "message"), [
    (NoTokenizer("stopping.stop: the served model has no tokenizer; use stop_token_ids"),
     "sampling_params.stop: the served model has no tokenizer; use stop_token_ids"),
    (NoTokenizer("text: the served model has no tokenizer; send token_ids"),
     "text: the served model has no tokenizer; send tokenized"),
    (NoTokenizer("json_schema: the served model has no tokenizer"),
     "sampling_params.json_schema: the served model has no tokenizer"),
    (DuplicateRequest("request_id: x is that of a live request"), "request_id: x is that of a live request"),
    (QueueFull("queue full"), "queue full"),
])
def test_client_paths_renames_the_field_of_other_errors(error: ServeError, message: str) -> None:
    with pytest.raises(type(error)) as renamed, client_paths():
        raise error
    assert renamed.value.message == message
