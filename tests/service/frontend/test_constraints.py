"""Constrained requests in a front end over a fake engine, which completes every constraint that ends with <eos>."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from npuserve.service.errors import InvalidField, to_wire
from npuserve.service.ipc.messages import Submit
from npuserve.service.structured_output.constraint import Constraint
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import EOS, until
from tests.support.front_end import ask, running
from tests.support.vllm_engine import engine_stub, join, vllm_request


@pytest.mark.parametrize(("fields", "completed"), [
    ({"regex": "a*"}, True), ({"regex": "a*", "max_tokens": 2}, False), ({"regex": "a*", "stop": ["b"]}, False),
    ({"json_object": False}, False), ({}, False),
], ids=["complete", "cut by max_tokens", "cut by a stop string", "json_object false", "no constraint"])
async def test_finish_has_grammar_completed(folder: Path, fields: dict[str, object], completed: bool) -> None:
    async with running(folder) as server:
        server.engine.script = [0, 1, 2, EOS]
        unary = await server.inference.Generate(ask(**fields))
        parts = [part async for part in server.inference.StreamGenerate(ask(**fields))]
        samples = await server.inference.Generate(ask(**fields, n=2))
    finishes = [unary.finish, parts[-1].finish, *(sample.finish for sample in samples.samples)]
    assert len(finishes) == 4
    assert [finish.grammar_completed for finish in finishes] == [completed] * 4


async def test_samples_end_with_their_own_grammar_completed(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.scripts = {0: [0, EOS], 1: [0]}
        answer = await server.inference.Generate(ask(json_object=True, n=2))
        constraints = [submit.request.constraint for submit in server.engine.got(Submit)]
    assert [sample.finish.grammar_completed for sample in answer.samples] == [True, False]
    assert constraints == [Constraint("json_object", "")] * 2


async def test_resumed_stream_has_grammar_completed(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay, server.engine.script = 0.01, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, EOS]
        call = server.inference.StreamGenerate(ask("a", 20, json_schema="{}"))
        token = dict(await call.initial_metadata())["x-resume-token"]
        await call.read()
        call.cancel()
        await until(lambda: server.engine.live == 0)
        kept = server.frontend._engine._records.find(token, "", time.monotonic())
        assert kept
        assert kept.request.constraint == Constraint("json_schema", "{}")
        server.engine.records[token] = kept
        again = server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token=token))
        parts = [part async for part in again]
    assert "".join(part.text for part in parts) == "abcdefghij"
    assert parts[-1].finish.grammar_completed


async def test_constraint_that_the_engine_refuses_is_invalid_argument(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    large = '{"description": "' + "a" * 60_000 + '"}'
    async with running(folder) as server:
        server.engine.refuse = to_wire(InvalidField("json_schema", "/properties/a: keyword if is not supported"))
        for call in (server.inference.Generate(ask(json_schema=large)),
                     server.inference.StreamGenerate(ask(json_schema=large)).read(),
                     server.inference.Generate(ask(json_schema=large, n=3))):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert failed.value.details() == "json_schema: /properties/a: keyword if is not supported"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await engine_stub(server.channel).Generate(vllm_request("a", json_schema=large)).read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.value.details() == "sampling_params.json_schema: /properties/a: keyword if is not supported"
        server.engine.refuse = None
        assert (await server.inference.Generate(ask(json_schema=large))).text
        assert {submit.request.constraint for submit in server.engine.got(Submit)} == {Constraint("json_schema", large)}
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["constraint"] for line in lines] == ["json_schema"] * 5


async def test_vllm_engine_passes_each_constraint(folder: Path) -> None:
    choice = vllm_request("a", 3)
    choice.sampling_params.choice.choices.extend(["b", "c"])
    requests = {
        Constraint("json_schema", "{}"): vllm_request("a", 3, json_schema="{}"),
        Constraint("regex", "a+"): vllm_request("a", 3, regex="a+"),
        Constraint("grammar", 'root ::= "a"'): vllm_request("a", 3, grammar='root ::= "a"'),
        Constraint("structural_tag", "{}"): vllm_request("a", 3, structural_tag="{}"),
        Constraint("json_object", ""): vllm_request("a", 3, json_object=True),
        Constraint("choices", '["b", "c"]'): choice,
    }
    async with running(folder) as server:
        for request in requests.values():
            (found,) = join([part async for part in engine_stub(server.channel).Generate(request)]).values()
            assert (found.token_ids, found.reason) == ([1, 2, 3], "length")
        assert [submit.request.constraint for submit in server.engine.got(Submit)] == list(requests)
    assert {constraint.kind for constraint in requests} == {
        field.name for field in pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["constraint"].fields}
