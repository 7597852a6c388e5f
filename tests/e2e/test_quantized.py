"""Checkpoints of each quantized form through gRPC: restart, resume, structured output, prefix cache, int8 KV cache and
speculation together."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Int8Rounding, Int4Rounding, Int8Rounding, Rounding
from npuserve.npu.step import SamplingParams
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2
from tests.e2e.processes import engine_of
from tests.e2e.server import Server, request, serving, streamed
from tests.npu.execution.test_runner import Driver, load

SETTINGS: dict[str, Any] = {"block_size": 16, "kv_cache_memory": 8 << 20, "threads": 1, "lm_head_dtype": "int8",
                            "kv_cache_dtype": "int8"}
PROMPT = "Once upon a time"
TOKENS = 160
REGEX = "[a-z]{3}( [a-z]{2,6}){4}"


@pytest.mark.parametrize(("name", "rounding"), [
    pytest.param("w8a8", Int8Rounding(), id="w8a8"),
    # In memory as w8a8: tests/npu/model/test_modelslim.py.
    pytest.param("w8a8", Int8Rounding(modelslim=True), id="modelslim", marks=pytest.mark.full),
    # Of another form alone: tests/npu/execution and tests/npu/quantize.
    pytest.param("w4a16", Int4Rounding(32), id="w4a16", marks=pytest.mark.full),
    pytest.param("w4a8", Int4Int8Rounding(32), id="w4a8", marks=pytest.mark.full),
])
def test_a_quantized_model_is_served(tmp_path: Path, name: str, rounding: Rounding) -> None:
    """All answers are those of the runner alone, without a prefix cache and without drafts."""
    folder = tmp_path / "model"
    quantize_checkpoint(FOLDER, folder, rounding=rounding)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    expected = alone(folder, prompt)
    flags = [part for key, value in SETTINGS.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with serving(str(folder), "--device", "cpu", "--speculate", "suffix", "--no-double-buffering", *flags) as server:
        info = server.stub.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.quantization, info.dtype) == (name, "bfloat16")
        story, ids, _ = streamed(server.stub, ask())
        assert ids == expected
        assert len(set(story.split())) > 8  # different words
        constrained = server.stub.Generate(request(PROMPT, 40, regex=REGEX), timeout=100)
        assert re.fullmatch(REGEX, constrained.text)
        assert continued(server, prompt + expected[:64]) == expected[64:]
        assert killed_and_resumed(server) == expected  # the next engine finds the packed weights in memory
        assert server.stub.Generate(request(PROMPT, 40, regex=REGEX), timeout=100).text == constrained.text
        assert continued(server, prompt + expected[:64]) == expected[64:]


def ask() -> pb.GenerateRequest:
    return request(PROMPT, TOKENS, ignore_eos=True)


def alone(folder: Path, prompt: list[int]) -> list[int]:
    """Return the tokens of the runner."""
    driver = Driver(load(folder, **SETTINGS))
    driver.add(0, prompt, SamplingParams(temperature=0.0))
    while len(driver.generated(0)) < TOKENS:
        driver.step(64)
    return driver.generated(0)[:TOKENS]


def continued(server: Server, prompt: list[int]) -> list[int]:
    """Return the rest of the answer after a prompt with its beginning, of which at least a block is cached."""
    for _ in range(2):
        answer = server.stub.Generate(request(prompt, TOKENS - 64, ignore_eos=True), timeout=100)
    assert answer.finish.usage.cached_tokens >= 16
    return list(answer.token_ids)


def killed_and_resumed(server: Server) -> list[int]:
    """Return the tokens of a stream that loses its engine, and then its client, who resumes it."""
    call = server.stub.StreamGenerate(ask(), timeout=100)
    token = dict(call.initial_metadata())["x-resume-token"]
    ids = list(next(call).token_ids)
    os.kill(engine_of(server), signal.SIGKILL)
    ids += next(call).token_ids
    call.cancel()
    resumed = pb.ResumeStreamRequest(resume_token=token, token_offset=len(ids))
    for part in server.stub.ResumeStream(resumed, timeout=100):
        ids += part.token_ids
    return ids
