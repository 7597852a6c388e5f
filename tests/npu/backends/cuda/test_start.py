"""Requirements of a GPU, and the messages if one is missing. Needs neither a GPU nor triton."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from npuserve.kernels import triton
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.registry import Case
from npuserve.npu import backends
from npuserve.npu.backends import BackendError, backend_class, select
from npuserve.npu.backends.cuda import backend as cuda
from npuserve.npu.backends.cuda import emulated as cuda_emulated
from npuserve.npu.backends.cuda import graphs as cuda_graphs
from npuserve.npu.backends.cuda.backend import CudaBackend
from npuserve.npu.backends.cuda.graphs import token_buckets
from npuserve.npu.backends.machine import takes_case


@pytest.fixture(autouse=True)
def not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_emulated", {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make triton and a GPU appear present, as far as can be seen without starting it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else find(name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))


@pytest.mark.usefixtures("installed")
def test_cuda_start_without_triton_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    assert not CudaBackend.available()
    with pytest.raises(BackendError, match=r"^device: triton is not installed: pip install 'npuserve\[cuda\]'"):
        select("cuda")
    with pytest.raises(BackendError, match=r"^emulate: triton is not installed: pip install 'npuserve\[cuda\]'"):
        select("cuda", [])


@pytest.mark.usefixtures("installed")
def test_cuda_available_with_triton_and_gpu() -> None:
    assert CudaBackend.available()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("module", "name", "value", "said"), [
    (torch.version, "cuda", None, "built without CUDA: install the torch of a CUDA index"),
    (torch.cuda, "is_available", lambda: False, "no NVIDIA GPU can be used: check with nvidia-smi"),
    (torch.cuda, "get_device_capability", lambda _: (7, 5), "a GPU has compute capability 7.5, and 8.0 or later"),
])
def test_cuda_start_without_suitable_gpu_gives_advice(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, said: str
) -> None:
    monkeypatch.setattr(module, name, value)
    assert not CudaBackend.available()
    with pytest.raises(BackendError, match=f"^device: .*{said}"):
        select("cuda")


@pytest.mark.usefixtures("installed")
def test_cuda_start_failure_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Any) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    with pytest.raises(BackendError, match=r"^device: the GPU cannot be started \(CUDA error: .* unavailable\): check"):
        select("cuda")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("Failed to find C compiler. Please specify via CC"), "Failed to find C compiler"),
    (subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"]), "returned non-zero exit status 1"),
])
def test_cuda_start_without_c_compiler_gives_advice(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    class Driver:
        @property
        def active(self) -> None:
            raise error

    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=Driver()))
    monkeypatch.setattr(CudaBackend, "open_device", lambda *_: (cuda_emulated, torch.device("cpu"), (9, 0)))
    with pytest.raises(BackendError, match=rf"^device: triton cannot build .* \(.*{said}.*\): install a C compiler"):
        select("cuda")


def test_cuda_emulate_with_relaxation_is_refused() -> None:
    with pytest.raises(BackendError, match=r"^emulate_relax: fp32: cuda takes none"):
        select("cuda", ["fp32"])
    assert backend_class("cuda") is CudaBackend


def test_emulated_torch_has_signatures_of_torch_cuda() -> None:
    """The substitute has each function and class of torch.cuda that a backend uses, with the same parameter names."""
    for name in ("Event", "Stream", "graph_pool_handle", "set_stream", "stream", "synchronize", "mem_get_info",
                 "memory_reserved", "memory_allocated", "get_device_name", "get_device_capability", "device_count"):
        real, own = getattr(torch.cuda, name), getattr(cuda_emulated, name)
        if inspect.isclass(real):
            methods = [method for method in vars(own) if not method.startswith("_") and method not in ("put", "run")]
            assert all(hasattr(real, method) for method in methods), name
        else:
            assert len(inspect.signature(own).parameters) <= len(inspect.signature(real).parameters), name
    inspect.signature(torch.cuda.graph.__init__).bind(None, None, pool=0, stream=0, capture_error_mode="thread_local")


def test_cuda_record_captures_once_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def graph(made: Graph, *, pool: str, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert (type(made), pool, stream) == (Graph, "pool", "stream")
        said.append("begin")
        yield
        said.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    output = torch.ones(2)

    def step() -> torch.Tensor:
        said.append("step")
        return output

    replay = cuda_graphs.record(step, "stream", "pool")
    assert said == ["step", "begin", "step", "end"]  # Triton compiles at the first call
    assert [replay() is output, replay() is output] == [True, True]
    assert said[4:] == ["replay", "replay"]


def test_token_buckets() -> None:
    assert token_buckets(1) == (1,)
    assert token_buckets(20) == (1, 2, 4, 8, 16, 20)
    assert token_buckets(128) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert token_buckets(8192) == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("capability", "possible"), [((8, 9), ["int8", "fp8"]), ((9, 0), ["int8", "fp8"]),
                                                      ((8, 0), ["int8"]), ((8, 6), ["int8"])])
def test_float8_needs_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], possible: list[str]
) -> None:
    for name, value in (("get_device_capability", capability), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    backend = CudaBackend.__new__(CudaBackend)
    _, _, found = backend.open_device((0, 1))
    backend.capabilities = cuda.limited(CudaBackend.capabilities, found)
    assert [name for name, dtype in QUANTIZED.items() if dtype in backend.capabilities.cache_dtypes] == possible
    takes_float8 = takes_case(backend, Case("some", lambda *_: (), float8=True))
    assert backend.capabilities.float8 == takes_float8 == ("fp8" in possible)
    if "fp8" not in possible:
        with pytest.raises(BackendError, match=r"kv_cache_dtype: 'fp8' is not possible .*; possible are auto, int8$"):
            backend.cache_dtype("fp8", torch.bfloat16)


def test_cuda_class_properties() -> None:
    assert (CudaBackend.name, triton.LABEL) == ("cuda", "cuda")
    assert cuda.BACKEND is CudaBackend
    assert CudaBackend.capabilities.cache_dtypes == (torch.int8, torch.float8_e4m3fn)
    assert not CudaBackend.capabilities.int8_zeros
