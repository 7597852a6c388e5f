"""A quantized checkpoint through gRPC."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding
from npuserve.npu.step import SamplingParams
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import model_pb2
from tests.e2e.processes import engine_of
from tests.e2e.server import request, serving, streamed
from tests.npu.execution.test_runner import Driver, load
from tests.support.models import saved_w8a8

SETTINGS = {"block_size": 16, "kv_cache_memory": 8 << 20, "threads": 1, "lm_head_dtype": "int8"}


def test_a_w8a8_model_with_an_int8_head_is_served(tmp_path: Path) -> None:
    saved_w8a8(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16), tmp_path)
    for file in FOLDER.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    check_served(tmp_path, "w8a8")


def test_a_model_in_4_bits_with_an_int8_head_is_served(tmp_path: Path) -> None:
    quantize_checkpoint(FOLDER, tmp_path / "int4", rounding=Int4Rounding(32))
    check_served(tmp_path / "int4", "w4a16", kv_cache_dtype="int8")


def check_served(folder: Path, name: str, **settings: Any) -> None:
    """Check that an answer is the same again, after a restart of the engine, and from the runner alone."""
    settings = SETTINGS | settings
    flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with serving(str(folder), "--device", "cpu", *flags) as server:
        info = server.stub.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.quantization, info.dtype) == (name, "bfloat16")
        story, ids, _ = streamed(server.stub, request("Once upon a time", 24))
        assert streamed(server.stub, request("Once upon a time", 24))[1] == ids
        os.kill(engine_of(server), signal.SIGKILL)  # the next engine finds the packed weights in memory
        assert streamed(server.stub, request("Once upon a time", 24))[1] == ids
    prompt = AutoTokenizer.from_pretrained(folder)("Once upon a time")["input_ids"]
    driver = Driver(load(folder, **settings))
    driver.add(0, prompt, SamplingParams(temperature=0.0))
    while len(driver.generated(0)) < 24:
        driver.step(64)
    assert driver.generated(0)[:24] == ids
    assert len(set(story.split())) > 8  # different words
