"""`npuserve check MODEL --compare`: the verdict, its table, and what it cannot compare."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.cli import compare as module
from npuserve.cli import main as cli
from npuserve.kernels import native
from npuserve.npu.backends.cpu import HostMemory
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from tests.support.hybrids import saved_as_published
from tests.support.models import edit_config, random_model, saved
from tests.support.pooling import embeds

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER", 8)
    monkeypatch.setattr(module, "PROMPT", 24)


def compared(capsys: Capture, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["check", str(folder), "--compare", "--device", "cpu", "--threads", "1", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["comparison"]


def dense(folder: Path) -> Path:
    return saved(random_model("qwen3", max_position_embeddings=256), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "hybrid", "nested hybrid"])
def test_compare_in_float32_requires_equal_tokens(tmp_path: Path, capsys: Capture, kind: str) -> None:
    if kind == "dense":
        dense(tmp_path)
    else:
        saved_as_published(3 if kind == "nested hybrid" else 2, tmp_path)
    code, found = compared(capsys, tmp_path, "--dtype", "float32")
    assert (code, found["passed"], found["dtype"]) == (0, True, "float32")
    assert [(each["answer"], each["equal"]) for each in found["prompts"]] == [(8, 8)] * 5
    assert 0 < max(each["logprob_difference"] for each in found["prompts"]) < 1e-4


def test_compare_in_bfloat16_judges_as_acceptance_does(tmp_path: Path, capsys: Capture) -> None:
    saved_as_published(2, tmp_path)
    code, found = compared(capsys, tmp_path, "--dtype", "bfloat16")
    assert (code, found["passed"], found["dtype"]) == (0, True, "bfloat16")
    assert "positions have the same argmax" in found["rule"]
    assert found["logit_difference"] > 1e-3


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_compare_of_other_answers_fails(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The device computes a layer with the weights of another one."""
    dense(tmp_path / "good")
    dense(tmp_path / "wrong")
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    save_file(tensors, tmp_path / "wrong" / "model.safetensors", {"format": "pt"})
    real = module._their_logits
    monkeypatch.setattr(module, "_their_logits", lambda folder, *rest: real(tmp_path / "good", *rest))
    code, found = compared(capsys, tmp_path / "wrong", "--dtype", dtype)
    assert (code, found["passed"]) == (1, False)
    assert cli.main(["check", str(tmp_path / "wrong"), "--compare", "--device", "cpu", "--dtype", dtype]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"NOT as transformers in {dtype}" in lines[-1]
    assert len([line for line in lines if "/8 " in line]) == 5


def test_compare_of_small_errors_in_float32_fails(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._their_logits
    monkeypatch.setattr(module, "_their_logits", lambda *args: [logits * 1.001 for logits in real(*args)])
    code, found = compared(capsys, dense(tmp_path), "--dtype", "float32")
    assert (code, found["passed"]) == (1, False)
    assert all(each["equal"] == each["answer"] for each in found["prompts"])
    assert "(limit 1e-04)" in found["rule"]


def test_compare_of_int8_layers_is_judged_by_their_rounding(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("compressed_tensors")
    quantize_checkpoint(dense(tmp_path / "float"), tmp_path / "int8")
    code, found = compared(capsys, tmp_path / "int8", "--dtype", "float32")
    assert code == (0 if found["passed"] else 1)
    assert "positions have the same argmax" in found["rule"]
    assert found["equal_argmax"] > 0.9


def refused(capsys: Capture, folder: Path) -> str:
    assert cli.main(["check", str(folder), "--compare", "--device", "cpu", "--threads", "1"]) == 2
    return capsys.readouterr().err


def test_compare_names_what_is_missing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    dense(tmp_path)
    with monkeypatch.context() as patch:
        found = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name))
        assert "transformers is not installed; install it with: pip install 'npuserve[transformers]'" in refused(
            capsys, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "available", lambda self: 64 << 20)
        patch.setattr(module, "COPIES", 10**5)
        message = refused(capsys, tmp_path)
        assert "compare: transformers needs" in message
        assert "and 64.0 MiB is available; compare on a machine with more memory" in message
    edit_config(tmp_path, model_type="unheard_of")
    message = refused(capsys, tmp_path)
    assert "does not load this checkpoint, so that nothing was compared" in message
    assert "compare the checkpoint that it was made from" in message


def test_compare_lets_linear_attention_run_token_by_token(tmp_path: Path) -> None:
    """And leaves transformers as it was."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    chunked = modeling_qwen3_5.torch_chunk_gated_delta_rule
    saved_as_published(2, tmp_path)
    ids = [5] * 70
    by_token = module._their_logits(tmp_path, torch.float32, [ids])[0]
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is chunked
    assert by_token.shape == (70, 120)


def test_compare_of_a_model_without_answers_is_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    embeds(dense(tmp_path))
    assert cli.main(["check", str(tmp_path), "--compare", "--device", "cpu"]) == 2
    assert "compare: answers are compared, and the model is an embedding model or a reranker" in capsys.readouterr().err
