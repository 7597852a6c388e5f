"""No part of a prompt, an answer or a secret is in a log line, a metric or a trace, however the call ends."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf import struct_pb2
from prometheus_client import REGISTRY, generate_latest

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.errors import InvalidField, Unavailable, to_wire
from npuserve.service.logs import JsonFormatter, TextFormatter
from npuserve.v1 import admin_service_pb2, prompt_pb2, tokenize_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.support.collector import Collector
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import Running, ask, running
from tests.support.raw_connection import RawConnection

MARK = "zqjxmark"
"""Part of every text that the client sends."""

TEMPLATE = """
{%- if messages[0].content.endswith('refuse') %}{{ raise_exception('no: ' ~ messages[0].content) }}{% endif %}
{% if messages[0].content.endswith('fail') %}{{ messages[0].content + 1 }}{% endif %}
{% if messages[0].content.endswith('key') %}{{ messages[0][messages[0].content].x.y }}{% endif %}
{{- messages[0].content }}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_folder(tmp_path / "counting")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def struct(**values: object) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(values)
    return made


def chat(content: str, **fields: Any) -> pb.GenerateRequest:
    turn = prompt_pb2.Message(role=fields.pop("role", "user"), content=content, **fields.pop("turn", {}))
    return pb.GenerateRequest(chat=prompt_pb2.Chat(messages=[turn], **fields))


REFUSED: dict[str, pb.GenerateRequest] = {
    "too long": ask(MARK * 20),
    "far too long": ask(MARK * 10_000),
    "stop string too long": ask(MARK, stop=[MARK * 200]),
    "stop string among others": ask(MARK, stop=[MARK, ""]),
    "salt too long": ask(MARK, cache_salt=MARK * 40),
    "another model": ask(MARK, model=MARK),
    "schema that is no JSON": ask(MARK, json_schema=MARK), "tag that is no JSON": ask(MARK, structural_tag=f'"{MARK}"'),
    "regex too large": ask(MARK, regex=MARK * 10_000),
    "equal choices": pb.GenerateRequest(text=MARK, choices=pb.Choices(choices=[MARK, MARK])),
    "temperature": ask(MARK, temperature=-1),
    "template refuses": chat(f"{MARK} refuse"),
    "template fails": chat(f"{MARK} fail"),
    "template misses a key": chat(f"{MARK} key"),
    "template argument taken": chat(MARK, template_args=struct(messages=MARK)),
    "template argument NaN": chat(MARK, template_args=struct(**{MARK: float("nan")})),
    "tool that is no JSON": chat(MARK, tools=[f"{{'{MARK}'"]),
    "tool call that is no JSON": chat(MARK, turn={"tool_calls": [f"[{MARK}"]}),
    "chat too long": chat(MARK * 20, role=MARK, turn={"name": MARK, "reasoning_content": MARK}),
}


async def code(call: Any) -> str:
    """Read all messages of a call; return the name of its status code."""
    try:
        if hasattr(call, "read"):
            while await call.read():
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return (await call.code()).name


async def every_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make calls of all kinds; return the status code of each."""
    inference, engine, found = server.inference, server.engine, {}
    for name, request in REFUSED.items():
        found[name] = await code(inference.StreamGenerate(request))
        found[f"{name}, unary"] = await code(inference.Generate(request))
    found["answered"] = await code(inference.StreamGenerate(ask(MARK, 3, stop=[MARK])))
    found["constrained"] = await code(inference.StreamGenerate(ask(MARK, 3, regex=MARK)))
    found["chat"] = await code(inference.Generate(chat(MARK, template_args=struct(**{MARK: MARK}))))
    found["tokenize"] = await code(inference.Tokenize(tokenize_pb2.TokenizeRequest(text=MARK)))
    found["tokenize for another"] = await code(
        inference.Tokenize(tokenize_pb2.TokenizeRequest(text=MARK, model=MARK)))
    found["detokenize"] = await code(inference.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[9999])))
    found["resume"] = await code(inference.ResumeStream(pb.ResumeStreamRequest(resume_token=MARK)))
    found["abort"] = await code(server.admin.Abort(admin_service_pb2.AbortRequest(request_id=MARK)))
    engine.refuse = to_wire(Unavailable("no"))
    found["refused by the engine"] = await code(inference.Generate(ask(MARK, 3)))
    engine.refuse = to_wire(InvalidField("grammar", f"line 1: unexpected {MARK}"))
    found["grammar that the engine refuses"] = await code(inference.Generate(ask(MARK, 3, grammar=MARK)))
    engine.refuse = None
    engine.hold.clear()
    found["deadline"] = await code(inference.StreamGenerate(ask(MARK, 3), timeout=0.2))
    await until(lambda: engine.live == 0)
    held = inference.StreamGenerate(ask(MARK, 3))
    reading = asyncio.ensure_future(code(held))
    await until(lambda: engine.live == 1)
    held.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    engine.hold.set()
    folder = server.frontend._generation.folder
    assert folder
    assert folder.tokenizer

    def bug(text: str, *_: object, **__: object) -> list[int]:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"cannot take {text}") from error

    with monkeypatch.context() as patch:
        patch.setattr(folder.tokenizer, "encode", bug)
        info = server.frontend._engine.require()
        patch.setattr(server.frontend._engine, "model_info", msgspec.structs.replace(info, max_model_len=1 << 20))
        found["a bug"] = await code(inference.StreamGenerate(ask(MARK)))
        found["a bug, in a chat"] = await code(inference.Generate(chat(MARK)))
        found["a bug, in a thread"] = await code(inference.Tokenize(tokenize_pb2.TokenizeRequest(text=MARK * 9999)))
    return found


async def test_privacy_prompt_is_in_no_log_metric_or_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, collector: Collector
) -> None:
    caplog.set_level(logging.DEBUG, "npuserve")
    caplog.set_level(logging.INFO)
    async with running(folder, administrator=True, otlp_endpoint=collector.url, max_model_len=64) as server:
        found = await every_end(server, monkeypatch)
        info = await server.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
    assert set(found.values()) == {
        "OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL"}, found
    assert found["answered"] == found["constrained"] == found["chat"] == "OK"
    assert found["a bug"] == found["a bug, in a chat"] == found["a bug, in a thread"] == "INTERNAL"
    lines = [form("frontend-0").format(record) for record in caplog.records for form in (JsonFormatter, TextFormatter)]
    spans = [str(span) for span in collector.spans]
    assert len([line for line in lines if "request" in line]) >= 2 * (len(found) - 2)
    assert len(spans) > len(REFUSED)
    for text in (*lines, *spans, generate_latest(REGISTRY).decode(), info.config_json):
        assert MARK not in text.lower(), text
    bugs = [r.fields for r in caplog.records if r.getMessage() == "internal error"]  # type: ignore[attr-defined]
    assert len(bugs) == 3
    assert all(b["exception_type"] == "ValueError from KeyError" and "in bug" in b["traceback"] for b in bugs)
    fields = {r.fields.get("error") for r in caplog.records if hasattr(r, "fields")}
    assert {"InvalidField: chat.template_args", "ModelNotFound"} <= fields
    assert "InvalidField: stopping.stop[1]: must be 1 to 1024 characters, got 0" in fields


async def test_privacy_resume_token_is_in_no_log_or_metric(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "npuserve")
    async with running(folder) as server:
        stream = server.inference.StreamGenerate(ask("a", 3))
        token = dict(await stream.initial_metadata())["x-resume-token"]
        assert await code(stream) == "OK"
        await code(server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token=token)))
        page = generate_latest(REGISTRY).decode()
    for record in caplog.records:
        assert token not in JsonFormatter("x").format(record)
    assert token not in page


async def test_privacy_metadata_in_another_encoding_is_in_no_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as server:
        connection = await RawConnection.open(int(server.target.rpartition(":")[2]))
        key = f"Bearer {MARK}\xa0".encode("latin-1")
        assert b"grpc-status\x010" in await connection.generate(ask("a", 2), (b"authorization", key), (b"x-other", key))
        connection.close()
    for record in caplog.records:
        assert record.name != "grpc._cython.cygrpc"
        assert MARK not in JsonFormatter("x").format(record)


def test_privacy_log_prompts_adds_exception_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("npuserve.service.somewhere")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for wanted in (False, True):
        logs.setup(ServerConfig(log_format="json", log_prompts=wanted), "x")
        try:
            raise ValueError(MARK)
        except ValueError as error:
            logs.bug(log, "internal error", error, error_id="7")
        logging.getLogger().handlers[0].flush()
        line = json.loads(capsys.readouterr().err)
        assert (line["exception_type"], line["error_id"]) == ("ValueError", "7")
        assert line.get("text") == (MARK if wanted else None)
    logs.setup(ServerConfig(), "x")
    logging.captureWarnings(False)
