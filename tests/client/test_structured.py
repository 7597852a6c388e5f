"""Constraints as options, and the objects in answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from npuserve.client import AsyncClient, Client, IncompleteAnswer, parsed
from npuserve.client.request_builder import Options, build_request
from npuserve.client.structured import CONSTRAINTS
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc

pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    name: str
    age: int = pydantic.Field(ge=0)


class Named:
    """Model class without pydantic."""

    def __init__(self, name: str):
        self.name = name

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"title": cls.__name__}

    @classmethod
    def model_validate_json(cls, json_data: str) -> Named:
        return cls(json.loads(json_data)["name"])


SCHEMA = {"type": "object", "properties": {"größe": {"type": "number"}}}


def test_constraints_are_options() -> None:
    assert set(CONSTRAINTS) == {"json_schema", "regex", "grammar", "choices", "json_object", "structural_tag"}
    assert set(CONSTRAINTS) <= set(Options.__annotations__)


@pytest.mark.parametrize(("options", "expected"), [
    ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA, ensure_ascii=False)}),
    ({"json_schema": "true"}, {"json_schema": "true"}),
    ({"json_schema": Person}, {"json_schema": json.dumps(Person.model_json_schema())}),
    ({"json_schema": Named}, {"json_schema": '{"title": "Named"}'}),
    ({"regex": "a*"}, {"regex": "a*"}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"json_object": True}, {"json_object": True}),
    ({"json_object": False}, {"json_object": False}),
    ({"structural_tag": {"type": "structural_tag"}}, {"structural_tag": '{"type": "structural_tag"}'}),
    ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
    ({"choices": ("yes", "no")}, {"choices": pb.Choices(choices=["yes", "no"])}),
    ({"choices": []}, {"choices": pb.Choices()}),
])
def test_build_request_sets_a_constraint(options: Any, expected: dict[str, Any]) -> None:
    assert build_request("a", options) == pb.GenerateRequest(text="a", **expected)
    given = pb.GenerateRequest(text="a", choices=pb.Choices(choices=["old"]))
    assert build_request(given, options) == pb.GenerateRequest(text="a", **expected)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"json_schema": "{}", "max_tokens": 3, "regex": "a"}, TypeError, "regex: cannot be combined with json_schema"),
    ({"json_schema": 7}, TypeError, "json_schema: must be a text, a dict or a model class, got 7"),
    ({"json_schema": int}, TypeError, "json_schema: must be a text, a dict or a model class, got <class 'int'>"),
    ({"json_schema": {"const": {1}}}, TypeError, "json_schema: Object of type set is not JSON serializable"),
    ({"json_schema": {"const": float("nan")}}, ValueError, "json_schema: Out of range float values"),
    ({"json_schema": {"const": "\ud800"}}, ValueError, "json_schema: .*surrogates not allowed"),
    ({"structural_tag": Person}, TypeError, "structural_tag: must be a text or a dict, got <class"),
    ({"structural_tag": ["a"]}, TypeError, "structural_tag: must be a text or a dict, got "),
    ({"choices": "yes"}, TypeError, "choices: must be a sequence of texts, got str"),
    ({"choices": {"yes"}}, TypeError, "choices: must be a sequence of texts, got set"),
    ({"choices": ["yes", 1]}, TypeError, "choices: "),
    ({"choices": ["\ud800"]}, ValueError, "choices: .*surrogates not allowed"),
    ({"regex": "\ud800"}, ValueError, "regex: .*surrogates not allowed"),
    ({"grammar": 7}, TypeError, "grammar: "),
    ({"json_object": "yes"}, TypeError, "json_object: "),
])
def test_build_request_bad_constraint_raises(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        build_request("a", options)


def answer(text: str, completed: bool = True, reason: Any = pb.FINISH_REASON_EOS) -> pb.GenerateResponse:
    return pb.GenerateResponse(text=text, finish=pb.Finish(reason=reason, grammar_completed=completed))


def test_parsed_returns_plain_values_or_an_instance() -> None:
    found = answer(' {"name": "Lily", "age": 3}\n')
    assert parsed(found) == {"name": "Lily", "age": 3}
    assert parsed(found, Person) == Person(name="Lily", age=3)
    assert parsed(found, Named).name == "Lily"
    sample = pb.Sample(text="[1]", finish=found.finish)
    assert parsed(sample) == [1]


def test_parsed_of_an_answer_that_is_cut_raises() -> None:
    with pytest.raises(IncompleteAnswer) as failed:
        parsed(answer('{"name": "Li', completed=False, reason=pb.FINISH_REASON_LENGTH))
    assert str(failed.value) == "the answer does not satisfy a constraint; it ended with LENGTH"
    with pytest.raises(IncompleteAnswer, match="it ended with EOS"):
        parsed(answer("{}", completed=False), Person)
    with pytest.raises(IncompleteAnswer, match="it ended with 99"):  # a reason of a newer server
        parsed(answer("{}", completed=False, reason=99))


def test_parsed_of_an_invalid_object_raises_value_error() -> None:
    with pytest.raises(pydantic.ValidationError):
        parsed(answer('{"name": "Lily", "age": -1}'), Person)
    with pytest.raises(ValueError, match="Expecting value"):
        parsed(answer("yes"))


def test_parsed_of_several_samples_raises() -> None:
    several = pb.GenerateResponse(samples=[pb.Sample(text="{}")])
    with pytest.raises(TypeError, match=r"pass each of answer\.samples"):
        parsed(several)


class Structured(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer whose samples are persons as old as their index, in two messages."""

    def __init__(self) -> None:
        self.schemas: list[str] = []

    async def StreamGenerate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self.schemas.append(request.json_schema)
        for index in range(request.n or 1):
            await context.write(pb.StreamGenerateResponse(text='{"name": "Li', num_tokens=2, index=index))
            finish = pb.Finish(reason=pb.FINISH_REASON_EOS, grammar_completed=True)
            await context.write(pb.StreamGenerateResponse(
                text=f'ly", "age": {index}}}', offset=2, num_tokens=3, index=index, finish=finish))


async def test_clients_return_answers_that_can_be_parsed() -> None:
    server, servicer = grpc.aio.server(), Structured()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncClient(target) as client:
            one = await client.generate("x", json_schema=Person)
            several = await client.generate("x", json_schema=Person, n=2)

        def work() -> list[pb.GenerateResponse]:
            with Client(target) as own:
                return [own.generate("x", json_schema=Person), own.generate("x", json_schema=Person, n=2)]

        assert await asyncio.to_thread(work) == [one, several]
    finally:
        await server.stop(None)
    assert parsed(one, Person) == Person(name="Lily", age=0)
    assert [parsed(sample, Person).age for sample in several.samples] == [0, 1]
    assert set(servicer.schemas) == {json.dumps(Person.model_json_schema())}
