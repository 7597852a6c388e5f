"""Constrained answers of a real server: valid by `jsonschema`, `re` and comparison, never by the grammar library."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from npuserve.client import AsyncClient, Client, IncompleteAnswer, parsed
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import tokenize_pb2
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.command import npuserve
from tests.support.real_models import BUILT_IN, model_folder, published
from tests.support.vllm_engine import counterpart, engine_stub, join

PROMPT = "Once upon a time there was a little girl named Lily."
MAX_TOKENS = 200
SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "pet"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 3, "maximum": 12},
        "pet": {"anyOf": [{"enum": ["cat", "dog", "ü"]}, {"type": "null"}]},
    },
}
ORDER = {
    "type": "object", "additionalProperties": False, "required": ["customer_name", "delivery_status"],
    "properties": {
        "customer_name": {"const": "the little girl named Lily"},
        "delivery_status": {"enum": ["waiting for delivery by the carrier", "waiting for payment by the customer"]},
    },
}
"""Most tokens of an answer are forced."""
NESTED = {
    "$defs": {"node": {
        "type": "object", "additionalProperties": False, "required": ["v"],
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}}}},
    "type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/node"},
}
TAG = {"type": "structural_tag", "format": {
    "type": "tag", "begin": "<answer>", "end": "</answer>",
    "content": {"type": "json_schema", "json_schema": {
        "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}}}}
SUM = 'root ::= number (" + " number){1,2} " = " number\nnumber ::= [1-9] [0-9]?\n'
REGEX = r"[A-Z][a-z]{2,6}, (cat|dog), \d{4}-\d\d"


def matches_schema(schema: Any) -> Callable[[str], None]:
    def check(text: str) -> None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))

    return check


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def is_tagged_list(text: str) -> None:
    inner = text.removeprefix("<answer>").removesuffix("</answer>")
    assert text == f"<answer>{inner}</answer>"
    jsonschema.validate(json.loads(inner), TAG["format"]["content"]["json_schema"])  # type: ignore[index]


CHOICES = ["The cat", "The dog ran", "Ünï 🎉", "42"]
FINITE = ("small schema", "regex", "grammar", "choices", "structural tag")
"""Cases whose longest answer has at most MAX_TOKENS bytes, so that every answer is complete."""
CASES: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "small schema": ({"json_schema": json.dumps(SMALL)}, matches_schema(SMALL)),
    "schema": ({"json_schema": json.dumps(PERSON)}, matches_schema(PERSON)),
    "forced": ({"json_schema": json.dumps(ORDER)}, matches_schema(ORDER)),
    "recursive schema": ({"json_schema": json.dumps(NESTED)}, matches_schema(NESTED)),
    "regex": ({"regex": REGEX}, matches(REGEX)),
    "grammar": ({"grammar": SUM}, matches(r"[1-9]\d?( \+ [1-9]\d?){1,2} = [1-9]\d?")),
    "choices": ({"choices": CHOICES}, lambda text: CHOICES.index(text) * 0),
    "structural tag": ({"structural_tag": json.dumps(TAG)}, is_tagged_list),
}


def ask(max_tokens: int = MAX_TOKENS, **fields: Any) -> pb.GenerateRequest:
    choices = fields.pop("choices", None)
    made = request(PROMPT, max_tokens, **fields)
    if choices:
        made.choices.choices.extend(choices)
    return made


def check_ended(name: str, finish: pb.Finish, text: str, check: Callable[[str], None]) -> None:
    """Check an answer, which is complete unless it was cut by its length."""
    if finish.grammar_completed:
        check(text)
    else:
        assert name not in FINITE
        assert (finish.reason, finish.usage.generated_tokens) == (pb.FINISH_REASON_LENGTH, MAX_TOKENS)


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built-in model with a longer context than that of its training."""
    folder: Path = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(model_folder(BUILT_IN), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module", params=[
    BUILT_IN, *published("minimind2-small"),  # SentencePiece, and byte-level BPE
    *published("stories15M", "stories260K-qwen3", full=True)])
def server(request: pytest.FixtureRequest, built_in: Path) -> Iterator[Server]:
    folder = str(built_in if request.param == BUILT_IN else model_folder(request.param))
    with serving(folder, "--dtype", "float32", "--block-size", "16", "--kv-cache-memory", "96MiB") as running:
        yield running


of_the_built_in_model = pytest.mark.parametrize("server", [BUILT_IN], indirect=True, scope="module")


@pytest.mark.parametrize("name", CASES)
def test_answer_satisfies_the_constraint(server: Server, name: str, pytestconfig: pytest.Config) -> None:
    """Greedy and sampled, whole and streamed; and streamed through VllmEngine.

    With --full a second seed; and there also sampled and whole, which by default gateway/test_constraints.py has.
    """
    (fields, check), full = CASES[name], pytestconfig.getoption("--full")
    for sampling in ({}, *({"temperature": 1.2, "seed": seed} for seed in range(1 + full))):
        message = ask(**fields, **sampling)
        whole = server.stub.Generate(message, timeout=100)
        check_ended(name, whole.finish, whole.text, check)
        text, ids, finish = streamed(server.stub, message)
        assert (text, ids) == (whole.text, list(whole.token_ids))
        assert (finish.reason, finish.grammar_completed) == (whole.finish.reason, whole.finish.grammar_completed)
        if sampling and not full:
            continue
        theirs = counterpart(message)
        assert theirs is not None
        theirs.sampling_params.skip_special_tokens = True
        for theirs.stream in (True, False) if full else (True,):
            (found,) = join(engine_stub(server.channel).Generate(theirs, timeout=100)).values()
            assert found.token_ids[: len(ids)] == ids
            assert found.reason == ("length" if finish.reason == pb.FINISH_REASON_LENGTH else "stop")


@pytest.mark.full
@of_the_built_in_model
def test_long_strings_end_within_their_bounds_whatever_others_answer(server: Server) -> None:
    """Of several clients under one constraint, one after the other and together. None is refused.

    By default without a server: test_answers_of_one_constraint_end_whatever_others_have_built.
    """
    schema = {"type": "string", "minLength": 3000, "maxLength": 4000}
    asks = [ask(4000, json_schema=json.dumps(schema), temperature=1.0, seed=seed) for seed in range(6)]

    def text_of(message: pb.GenerateRequest) -> str:
        answer = server.stub.Generate(message, timeout=300)
        assert answer.finish.grammar_completed
        return answer.text

    texts = [text_of(message) for message in asks[:2]]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(text_of, asks))
    assert together[:2] == texts
    for text in together:
        matches_schema(schema)(text)


@pytest.mark.full
@of_the_built_in_model
def test_long_string_continues_after_the_death_of_the_engine(server: Server) -> None:
    """By default without a server in tests/service/structured_output/test_lexer.py."""
    schema = {"type": "string", "minLength": 1000, "maxLength": 1500}
    message = ask(1600, json_schema=json.dumps(schema), temperature=1.0, seed=1)
    whole = server.stub.Generate(message, timeout=300)
    text, killed = "", False
    for part in server.stub.StreamGenerate(message, timeout=300):
        text += part.text
        if len(text) >= 500 and not killed:
            os.kill(engine_of(server), signal.SIGKILL)
            killed = True
    assert killed
    assert text == whole.text
    matches_schema(schema)(whole.text)


def test_json_object_is_an_object(server: Server) -> None:
    """The bias makes closing brackets likely, so that the answers end."""
    closing = dict.fromkeys(server.stub.Tokenize(tokenize_pb2.TokenizeRequest(text="}")).token_ids, 20.0)
    for seed in range(4):
        answer = server.stub.Generate(
            ask(json_object=True, temperature=1.0, seed=seed, logit_bias=closing), timeout=100)
        assert answer.text.lstrip().startswith("{")
        if answer.finish.grammar_completed:
            assert isinstance(json.loads(answer.text), dict)
    answer = server.stub.Generate(ask(3, json_object=False, ignore_eos=True), timeout=100)
    assert (answer.finish.usage.generated_tokens, answer.finish.grammar_completed) == (3, False)


def test_answer_that_is_cut_is_not_completed(server: Server) -> None:
    answer = server.stub.Generate(ask(3, regex="[0-9]{40}"), timeout=100)
    assert re.fullmatch("[0-9]{3,12}", answer.text)
    assert (answer.finish.reason, answer.finish.grammar_completed) == (pb.FINISH_REASON_LENGTH, False)
    for include in (True, False):
        stopped = server.stub.Generate(ask(regex="([0-9]{2}-){30}", stop=["-"], include_stop=include), timeout=100)
        assert re.fullmatch("[0-9]{2}" + "-" * include, stopped.text)
        assert (stopped.finish.reason, stopped.finish.matched_stop, stopped.finish.grammar_completed) == (
            pb.FINISH_REASON_STOP_STRING, "-", False)


def test_samples_satisfy_the_constraint(server: Server) -> None:
    answer = server.stub.Generate(ask(regex=REGEX, n=4, temperature=1.5, seed=3), timeout=100)
    assert [sample.finish.grammar_completed for sample in answer.samples] == [True] * 4
    for sample in answer.samples:
        matches(REGEX)(sample.text)
    for index, sample in enumerate(answer.samples):
        alone = server.stub.Generate(ask(regex=REGEX, temperature=1.5, seed=3 + index), timeout=100)
        assert (alone.text, list(alone.token_ids)) == (sample.text, list(sample.token_ids))


def test_logprobs_are_of_the_answers_tokens(server: Server) -> None:
    answer = server.stub.Generate(ask(regex=REGEX, logprobs=3, prompt_logprobs=1), timeout=100)
    tokens = [position.chosen.token_id for position in answer.logprobs]
    assert tokens == list(answer.token_ids)
    assert all(position.chosen.logprob <= 0 and len(position.top) == 3 for position in answer.logprobs)


def test_forced_tokens_are_counted_and_equal_those_with_logprobs(server: Server) -> None:
    """With logprobs each token is sampled. One message carries several forced tokens."""
    fields = CASES["forced"][0] | {"temperature": 1.0, "seed": 4}
    sampled = server.stub.Generate(ask(logprobs=0, **fields), timeout=100)
    before = server.metric("npuserve_forced_tokens_total")
    parts = list(server.stub.StreamGenerate(ask(**fields), timeout=100))
    assert [i for part in parts for i in part.token_ids] == list(sampled.token_ids)
    assert parts[-1].finish.usage.generated_tokens == len(sampled.token_ids)
    assert max(part.num_tokens for part in parts) > 3
    assert [part.offset for part in parts] == list(itertools.accumulate(
        [part.num_tokens for part in parts[:-1]], initial=0))
    until(lambda: server.metric("npuserve_forced_tokens_total") > before + 3)


def test_constrained_and_other_requests_together_equal_those_alone(server: Server) -> None:
    """All requests share the prompt's blocks."""
    asks = [ask(40, temperature=1.0, seed=seed, **fields)
            for seed in range(2) for fields in ({}, *(fields for fields, _ in CASES.values()))]
    alone = [server.stub.Generate(message, timeout=100) for message in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda message: server.stub.Generate(message, timeout=100), asks))
    for one, other in zip(alone, together, strict=True):
        assert (one.text, list(one.token_ids)) == (other.text, list(other.token_ids))
        assert one.finish.grammar_completed == other.finish.grammar_completed


REFUSED = {
    "keyword": ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "json_schema", "uniqueItems"),
    "keyword in a property": (
        {"json_schema": '{"properties": {"a": {"not": {"type": "string"}}}}'}, "json_schema", "/properties/a"),
    "unknown reference": ({"json_schema": '{"$ref": "#/$defs/a"}'}, "json_schema", "#/$defs/a"),
    "unknown type": ({"json_schema": '{"type": "text"}'}, "json_schema", "type"),
    "false": ({"json_schema": "false"}, "json_schema", ""),
    "regex": ({"regex": "a(b"}, "regex", ""),
    "back reference": ({"regex": r"(a)\1"}, "regex", ""),
    "grammar": ({"grammar": 'root ::= "a'}, "grammar", ""),
    "unknown rule": ({"grammar": "root ::= other"}, "grammar", "other"),
    "tag": ({"structural_tag": '{"type": "structural_tag", "format": {"type": "poem"}}'}, "structural_tag", "poem"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_constraint_that_cannot_be_honoured_is_invalid_argument(server: Server, name: str) -> None:
    fields, field, text = REFUSED[name]
    message = ask(**fields)
    for call in (lambda: server.stub.Generate(message, timeout=60),
                 lambda: list(server.stub.StreamGenerate(message, timeout=60))):
        with pytest.raises(grpc.RpcError) as failed:
            call()
        error: Any = failed.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(f"{field}: ")
        assert text in error.details()
        assert "x-request-id" in dict(error.trailing_metadata())
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in rpc_status.from_call(error).details)
        assert [violation.field for violation in bad.field_violations] == [field]
    theirs = counterpart(message)
    assert theirs is not None
    with pytest.raises(grpc.RpcError) as failed:
        list(engine_stub(server.channel).Generate(theirs, timeout=60))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert failed.value.details() == f"sampling_params.{error.details()}"  # type: ignore[attr-defined]
    assert server.stub.Generate(ask(3, ignore_eos=True), timeout=60).finish.usage.generated_tokens == 3


LONG = "([a-z]{1,9} ){60}"


def test_stream_resumes_with_its_constraint(server: Server) -> None:
    message = ask(150, regex=LONG, temperature=1.0, seed=9)
    whole = server.stub.Generate(message, timeout=100)
    call = server.stub.StreamGenerate(message, timeout=100)
    token = dict(call.initial_metadata())["x-resume-token"]
    text, held = "", 0
    for part in call:
        text, held = text + part.text, part.offset + part.num_tokens
        if held >= 3:
            break
    call.cancel()
    with Client(server.target) as client:
        for part in client.resume(token, held):
            text += part.text
    assert text == whole.text


@pytest.mark.full
def test_streams_of_all_kinds_continue_after_the_death_of_the_engine(server: Server) -> None:
    """Grammars are compiled again, and each matcher is advanced over another number of tokens.

    A long constrained stream and one without a constraint run beside the others when the engine is killed.
    """
    asks = [ask(80, temperature=seed / 2, seed=seed, **fields) for seed in range(2) for fields, _ in CASES.values()]
    asks += [ask(150, regex=LONG, temperature=1.0, seed=10), ask(150, ignore_eos=True)]
    whole = [server.stub.Generate(message, timeout=100) for message in asks]
    messages, at_kill = [0] * len(asks), [0] * len(asks)
    kill = threading.Lock()  # taken once, and never released

    def read(place: int) -> tuple[str, pb.FinishReason, bool]:
        text = ""
        for part in server.stub.StreamGenerate(asks[place], timeout=100):
            text += part.text
            messages[place] += 1
            if min(messages[-2:]) >= 2 and kill.acquire(blocking=False):
                at_kill[:] = messages
                os.kill(engine_of(server), signal.SIGKILL)
        return text, part.finish.reason, part.finish.grammar_completed

    with ThreadPoolExecutor(len(asks)) as pool:
        found = list(pool.map(read, range(len(asks))))
    assert found == [(answer.text, answer.finish.reason, answer.finish.grammar_completed) for answer in whole]
    assert re.fullmatch(r"([a-z]{1,9} )*[a-z]{0,9}", found[-2][0])
    for place in (-2, -1):
        assert messages[place] > at_kill[place] >= 2


def test_python_client_returns_objects(server: Server) -> None:
    pydantic = pytest.importorskip("pydantic")
    pet = pydantic.create_model("Pet", __config__=pydantic.ConfigDict(extra="forbid"), tame=(bool, ...))
    with Client(server.target, timeout=100) as client:
        answer = client.generate(PROMPT, json_schema=pet, max_tokens=MAX_TOKENS, temperature=1.0, seed=1)
        found = parsed(answer, pet)
        assert parsed(answer) == found.model_dump()
        assert parsed(client.generate(PROMPT, choices=["7"], max_tokens=9)) == 7
        with pytest.raises(IncompleteAnswer, match="it ended with LENGTH"):
            parsed(client.generate(PROMPT, json_schema=pet, max_tokens=2), pet)

    async def work() -> pb.GenerateResponse:
        async with AsyncClient(server.target, timeout=100) as client:
            return await client.generate(PROMPT, json_schema=pet, max_tokens=MAX_TOKENS, temperature=1.0, seed=1)

    assert parsed(asyncio.run(work()), pet) == found


def test_command_prints_a_constrained_answer(server: Server, tmp_path: Path) -> None:
    done = npuserve("generate", PROMPT, "--target", server.target, "--choice", "yes", "--choice", "no")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("yes\n", "no\n")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [1]}')
    done = npuserve("generate", PROMPT, "--target", server.target, "--json-schema", str(schema))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    done = npuserve("generate", PROMPT, "--target", server.target, "--regex", "a{40}", "--max-tokens", "2")
    assert (done.returncode, done.stderr) == (
        1, "npuserve: the answer does not satisfy the constraint; it ended with LENGTH\n")
    schema.write_text('{"uniqueItems": true}')
    done = npuserve("generate", PROMPT, "--target", server.target, "--json-schema", str(schema))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"npuserve: {server.target}: json_schema: ")
    assert len(done.stderr.splitlines()) == 1
