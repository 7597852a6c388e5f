"""Traces find exactly the kernel with wrong results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from npuserve.cli.bench.kernel_calls import Call, Replay, Trace, load
from npuserve.kernels import native
from npuserve.kernels.registry import KERNELS
from npuserve.npu import storyteller
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.config import ModelError
from npuserve.npu.quantization.w8a8 import W8A8
from tests.support.models import random_model, saved_w8a8

LAYER = ["linear", "qk_norm_rope_kv_write", "paged_attention", "linear", "add_rms_norm", "linear_swiglu", "linear",
         "add_rms_norm"]
HEAD = ["linear", "greedy", "linear_argmax"]


def traced(**options: Any) -> tuple[list[Call], list[Replay]]:
    """Trace two layers of the built-in model."""
    dtype, dump, cache = (options.pop(*x) for x in (("dtype", "bfloat16"), ("dump", None), ("cache", "auto")))
    model, backend = load(storyteller.FOLDER, backend="cpu", dtype=dtype, threads=1, max_model_len=40, layers=2)
    found = list(Trace(model, backend, options.get("rows", 2), 33, options.get("lm_head", "full"), dump, cache).run())
    return [x for x in found if isinstance(x, Call)], [x for x in found if isinstance(x, Replay)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8")])
def test_trace_of_correct_kernels_reports_no_error(dtype: str, cache: str) -> None:
    calls, replays = traced(dtype=dtype, cache=cache)
    names = ["embedding", "rms_norm", *LAYER, *LAYER, *HEAD]
    assert [(x.step, x.index, x.kernel) for x in calls] == [
        (step, i, name) for step in ("prompt", "decode") for i, name in enumerate(names)]
    assert not [x for x in calls if x.wrong]
    floats = [x for x in calls if cache == "auto" or x.kernel != "qk_norm_rope_kv_write"]
    assert max(x.drift for x in floats) < {"bfloat16": 0.3, "float32": 1e-4}[dtype]
    assert calls[0].shape == (2 * 33, 256)
    assert calls[-3].shape == (2, 2048)
    assert [(x.step, x.same) for x in replays] == ([("prompt", True), ("decode", True)] if native.available() else [])
    assert all(min(x.in_kernels, x.seconds) > 0 for x in replays)


@pytest.mark.parametrize(("lm_head", "head", "rows"), [("skip", [], 0), ("single", HEAD, 1), ("full", HEAD, 2)])
def test_trace_lm_head_options(lm_head: str, head: list[str], rows: int) -> None:
    calls, _ = traced(lm_head=lm_head)
    of_decode = [x for x in calls if x.step == "decode"]
    assert [x.kernel for x in of_decode[18:]] == head
    assert all(x.shape[0] == rows for x in of_decode[18:])


Breaking = Callable[[Any, tuple[Any, ...]], Any]


def broken(monkeypatch: pytest.MonkeyPatch, name: str, breaking: Breaking, at: int) -> None:
    """Pass the result of the kernel's `at`-th call on the CPU through `breaking(result, args)`."""
    made = KERNELS[name].implementations["cpu"]
    seen: list[int] = []

    def function(*args: Any) -> Any:
        seen.append(1)
        result = made.function(*args)
        return breaking(result, args) if len(seen) == at else result

    monkeypatch.setitem(KERNELS[name].implementations, "cpu", dataclasses.replace(made, function=function))


def one_number(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    result.view(-1)[7] += 1.0
    return result


def written_twice(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Write the keys to the next block as well."""
    args[7][1] += args[7][0]
    return result


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
@pytest.mark.parametrize(("name", "breaking", "call", "index"), [
    ("linear_swiglu", one_number, 2, 15), ("paged_attention", one_number, 1, 4),
    ("qk_norm_rope_kv_write", written_twice, 1, 3),
])
def test_trace_finds_wrong_call(
    name: str, breaking: Breaking, call: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls show only drift, since each call is compared for its own arguments.

    Recording the captured step calls each kernel of both layers once.
    """
    broken(monkeypatch, name, breaking, 2 + call)
    calls, replays = traced()
    assert [(x.step, x.index, x.kernel) for x in calls if x.wrong] == [("prompt", index, name)]
    clean = [x for x in calls if x.step == "prompt" and x.index < index]
    assert max(x.drift for x in clean) < 0.2
    assert (replays[0].step, replays[0].same) == ("prompt", False)


def test_trace_of_golden_functions_has_no_difference() -> None:
    model, _ = load(storyteller.FOLDER, backend="cpu", threads=1, max_model_len=9, layers=1)
    found = list(Trace(model, CpuBackend(native=False), 1, 8, "skip").run())
    assert len(found) == 20
    assert all(isinstance(x, Call) and x.difference == x.relative == x.drift == 0.0 for x in found)


def test_trace_dump_writes_tensors(tmp_path: Path) -> None:
    calls, _ = traced(dump=tmp_path, rows=1)
    file = load_file(tmp_path / "prompt" / "0003-qk_norm_rope_kv_write.safetensors")
    names = {"result.0", "argument.7", "argument.8"}
    assert set(file) == {f"{of}{name}" for of in ("", "golden.", "pass.") for name in names}
    assert file["argument.7"].shape == (1, 128, 2, 64)
    written = file["argument.7"].flatten(0, 1)
    assert written[:33].any(dim=-1).all()
    assert not written[33:].any()
    call = calls[3]
    assert call.difference == max(float((file[name].double() - file[f"golden.{name}"].double()).abs().max())
                                  for name in names)
    assert (tmp_path / "decode" / "0019-greedy.safetensors").is_file()


def test_trace_load_of_float8_computes_floats(tmp_path: Path) -> None:
    saved_w8a8(random_model("qwen3"), tmp_path, W8A8(float8=True))
    model, _ = load(tmp_path, backend="cpu", threads=1, layers=1)
    assert not model.weights.quantized_inputs


def test_trace_load_too_many_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="layers: 6 are more than the 5"):
        load(storyteller.FOLDER, backend="cpu", layers=6)
