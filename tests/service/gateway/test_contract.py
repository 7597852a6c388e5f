"""docs/vllm-engine.md against the installed stubs: every method and field is described."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.descriptor import Descriptor
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

PAGE = (Path(__file__).parents[3] / "docs" / "vllm-engine.md").read_text(encoding="utf-8")
MAX_LINES = 150


def section(title: str) -> str:
    """Return the text below a heading, until the next one."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> set[str]:
    """Return the names in the first column of a section's tables."""
    cells = re.findall(r"^\| (.*?) \|", section(title), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def fields(message: Descriptor, prefix: str = "") -> set[str]:
    return {prefix + field.name for field in message.fields}


def test_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MAX_LINES


def test_every_method_is_described() -> None:
    service = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
    assert rows("Methods") == {method.name for method in service.methods}


def test_every_field_of_a_request_is_described() -> None:
    known = fields(vllm.GenerateRequest.DESCRIPTOR) | fields(vllm.SamplingParams.DESCRIPTOR)
    assert rows("GenerateRequest") - {"sampling_params"} == known - {"sampling_params"}


def test_every_field_of_an_answer_is_described() -> None:
    chunk, complete = vllm.GenerateStreamChunk.DESCRIPTOR, vllm.GenerateComplete.DESCRIPTOR
    assert rows("GenerateResponse") == fields(chunk, "chunk.") | fields(complete, "complete.")


def test_every_field_of_the_model_is_described() -> None:
    assert rows("GetModelInfoResponse") == fields(vllm.GetModelInfoResponse.DESCRIPTOR)


def test_every_field_of_a_load_is_described() -> None:
    assert rows("GetLoadsResponse") == fields(vllm.SchedulerLoad.DESCRIPTOR) - {"dp_rank"}


def test_every_field_of_the_server_is_described() -> None:
    named = set(re.findall(r"`(\w+)`", section("GetServerInfoResponse")))
    assert named == fields(vllm.GetServerInfoResponse.DESCRIPTOR)
