"""Valid requests and the engine's request for them. Invalid ones are in test_malformed.py."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.errors import InvalidField
from npuserve.service.requests import validation
from npuserve.service.requests.prompt import MAX_PIECE_CHARACTERS, prompt_token_ids
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.model_folder import ModelFolder, open_folder
from npuserve.service.text.model_path import resolve
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2, tokenize_pb2
from tests.support.fake_engine import EOS, INFO, make_folder
from tests.support.front_end import ask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = make_folder(tmp_path_factory.mktemp("model"), chat=True)
    return open_folder(path, str(path), "counting")


def check(message: pb.GenerateRequest, folder: ModelFolder) -> CheckedRequest:
    return validation.check(message, folder, INFO, "id-1", 12.5)


def test_check_of_absent_fields_uses_the_documented_defaults(folder: ModelFolder) -> None:
    checked = check(pb.GenerateRequest(text="abc"), folder)
    request = checked.request
    assert (request.request_id, request.prompt_ids, request.arrival) == ("id-1", [0, 1, 2], 12.5)
    assert request.max_tokens == INFO.max_model_len - 3
    assert request.eos_token_ids == {EOS}
    assert (request.stop_token_ids, request.priority, request.cache_salt) == (frozenset(), 0, "")
    assert not request.bypass_prefix_cache
    assert request.speculate
    assert msgspec.structs.replace(request.sampling, seed=0) == SamplingParams(ending_ids=(EOS,))
    assert checked == CheckedRequest(request, (), False, True, False)


def test_check_passes_every_field_to_the_engine(folder: ModelFolder) -> None:
    checked = check(ask(
        [5, 6], 9, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=2, seed=2**64 - 1, logit_bias={3: -100.0}, allowed_token_ids=[9, 3, 9], min_tokens=2,
        stop=["x", "yz"], stop_token_ids=[4, 8], include_stop=True, logprobs=0, prompt_logprobs=20,
        skip_special_tokens=False, return_token_ids=True, priority=-100, bypass_prefix_cache=True, cache_salt="s",
        speculate=False, model="counting", n=1), folder)
    request = checked.request
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=2.0, seed=2**64 - 1, logit_bias={3: -100.0}, allowed_token_ids=(3, 9), min_tokens=2,
        ending_ids=(4, 8, EOS), logprobs=0, prompt_logprobs=20)
    assert (request.prompt_ids, request.max_tokens, request.priority) == ([5, 6], 9, -100)
    assert (request.bypass_prefix_cache, request.cache_salt, request.speculate) == (True, "s", False)
    assert (request.stop_token_ids, request.eos_token_ids) == ({4, 8}, {EOS})
    assert checked == CheckedRequest(request, ("x", "yz"), True, False, True)


def test_check_with_ignore_eos_keeps_the_stop_tokens(folder: ModelFolder) -> None:
    request = check(ask(ignore_eos=True, stop_token_ids=[4]), folder).request
    assert (request.eos_token_ids, request.stop_token_ids, request.sampling.ending_ids) == (frozenset(), {4}, (4,))


def test_check_without_a_seed_draws_one(folder: ModelFolder) -> None:
    seeds = {check(ask(), folder).request.sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert check(ask(seed=0), folder).request.sampling.seed == 0


@pytest.mark.parametrize(("given", "taken"), [(0.0, 0.0), (1e-30, 0.01), (0.005, 0.01), (0.5, 0.5), (100.0, 100.0)])
def test_check_raises_tiny_temperatures(folder: ModelFolder, given: float, taken: float) -> None:
    assert check(ask(temperature=given), folder).request.sampling.temperature == taken


@pytest.mark.parametrize(("given", "taken"), [(-1, 0), (0, 0), (1, 1), (299, 299), (300, 0), (2**31 - 1, 0)])
def test_check_of_top_k_that_excludes_nothing_disables_it(folder: ModelFolder, given: int, taken: int) -> None:
    assert check(ask(top_k=given), folder).request.sampling.top_k == taken


def test_check_accepts_inclusive_bounds(folder: ModelFolder) -> None:
    assert check(ask("a" * 63, 1), folder).request.max_tokens == 1
    assert check(ask("a", 63, min_tokens=63), folder).request.max_tokens == 63
    assert check(ask("a", None, top_p=1, min_p=1, logprobs=20, priority=100, stop=["a" * 1024]), folder)
    assert check(ask([299]), folder).request.prompt_ids == [299]
    assert validation.request_id(ask(request_id="~" * 128)) == "~" * 128


def test_check_accepts_a_repeated_stop_string(folder: ModelFolder) -> None:
    assert check(ask(stop=["a", "b", "a"]), folder).stop == ("a", "b", "a")


def test_check_of_absent_fields_uses_the_defaults_of_the_model(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "m", temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1)
    folder = open_folder(path, str(path), "")
    sampling = check(ask(top_p=1.0), folder).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)


def test_check_of_a_chat_equals_the_text_of_the_template(folder: ModelFolder) -> None:
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="hi")])
    chat.template_args["extra"] = "<eos>"
    ids = check(pb.GenerateRequest(chat=chat, parse_special_tokens=True), folder).request.prompt_ids
    assert folder.tokenizer
    assert folder.tokenizer.decode(ids) == "user:hi\na<eos>"
    assert ids[-1] == EOS
    assert EOS not in check(pb.GenerateRequest(chat=chat), folder).request.prompt_ids
    response = validation.tokenize(
        tokenize_pb2.TokenizeRequest(chat=chat, parse_special_tokens=True), folder.tokenizer, 64)
    assert (list(response.token_ids), response.text) == (ids, "user:hi\na<eos>")


def test_tokenize_equals_the_prompt_of_generate(folder: ModelFolder) -> None:
    text = "né 中 <eos>"
    response = validation.tokenize(tokenize_pb2.TokenizeRequest(text=text), folder.tokenizer, 64)
    assert list(response.token_ids) == check(ask(text), folder).request.prompt_ids
    assert response.text == ""
    back = tokenize_pb2.DetokenizeRequest(token_ids=response.token_ids)
    assert validation.detokenize(back, folder.tokenizer, 300, 64) == text
    back.skip_special_tokens = True
    assert validation.detokenize(back, folder.tokenizer, 300, 64) == "né 中 "


def test_text_of_too_many_tokens_is_refused_after_its_first_piece(folder: ModelFolder) -> None:
    """Its bytes could be tokens of the longest kind."""
    text, length = "a" * 3 * MAX_PIECE_CHARACTERS, MAX_PIECE_CHARACTERS // 2
    too_long = f"^text: the first {MAX_PIECE_CHARACTERS} characters alone have more tokens than max_model_len, {length}"
    with pytest.raises(InvalidField, match=too_long):
        validation.check(ask(text), folder, msgspec.structs.replace(INFO, max_model_len=length), "id-1", 0.0)
    with pytest.raises(InvalidField, match=too_long):
        validation.tokenize(tokenize_pb2.TokenizeRequest(text=text), folder.tokenizer, length)


def test_check_with_an_id_outside_the_vocabulary_is_refused(folder: ModelFolder) -> None:
    """A tokenizer may have more tokens than the model has embeddings."""
    small = msgspec.structs.replace(INFO, vocabulary_size=297)
    for message, field in ((ask("a<eos>"), "text"), (pb.GenerateRequest(chat=prompt_pb2.Chat(
            messages=[prompt_pb2.Message(role="user", content="<eos>")]), parse_special_tokens=True), "chat")):
        with pytest.raises(InvalidField) as refused:
            validation.check(message, folder, small, "id-1", 0.0)
        assert refused.value.message == (
            f"{field}: the tokenizer makes token id 297 of it, and the model's ids are in [0, 296]")
    request = validation.check(ask("a", min_tokens=1), folder, small, "id-1", 0.0).request
    assert request.sampling.ending_ids == ()  # the model lacks the end-of-text token, so it is not masked


@pytest.mark.parametrize("model", ["", "counting"])
def test_check_of_an_empty_text_is_refused(folder: ModelFolder, model: str) -> None:
    """Also by the built-in model, whose tokenizer adds a beginning-of-text token."""
    served = folder if model else open_folder(resolve(""), "", "")
    with pytest.raises(InvalidField, match=r"^text: must be at least one token, got an empty prompt$"):
        check(ask(""), served)


def test_prompt_token_ids_with_parse_special_tokens_is_refused() -> None:
    message = pb.GenerateRequest(token_ids=prompt_pb2.TokenIds(ids=[1]), parse_special_tokens=False)
    with pytest.raises(InvalidField, match=r"^parse_special_tokens: is for text and chat"):
        prompt_token_ids(message, None, INFO)


def test_check_quotes_a_bounded_part_of_long_input(folder: ModelFolder) -> None:
    with pytest.raises(InvalidField) as bad:
        validation.check(ask(request_id="x" * 100_000), folder, INFO, "made", 0.0)
    assert len(bad.value.message) < 200
