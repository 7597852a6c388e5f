"""Programs of recorded calls."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.linear import linear
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.norm import rms_norm
from npuserve.npu.backends.base import CaptureError
from npuserve.npu.backends.cpu import CpuBackend
from tests.kernels.comparison import randn

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def chain(x: torch.Tensor, weights: list[PackedWeight]) -> torch.Tensor:
    apply = linear.implementations["cpu"].function
    for weight in weights:
        x = apply(x, weight, None)
    return x


def norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return rms_norm.implementations["cpu"].function(x, gamma, 1e-6)


def test_program_replay_equals_calls_for_any_rows():
    weights = [PackedWeight.pack(randn(64, 64, seed=i) / 8) for i in range(20)]
    x = torch.zeros(50, 64)
    program = native.record(lambda: chain(x, weights))
    for rows in (50, 1, 13):
        x[:rows] = randn(rows, 64, seed=rows)
        assert torch.equal(program.replay(rows), chain(x[:rows], weights))
    output, calls = program.replay_timed(13)
    assert torch.equal(output, chain(x[:13], weights))
    assert [name for name, _ in calls] == ["linear"] * 20
    assert all(seconds >= 0 for _, seconds in calls)


def test_program_dropped_outputs_share_memory():
    weights = [PackedWeight.pack(randn(64, 64, seed=i) / 8) for i in range(20)]
    x = torch.zeros(50, 64)
    places = []

    def step() -> torch.Tensor:
        y = x
        for weight in weights:
            y = chain(y, [weight])
            places.append(y.data_ptr())
        return y

    native.record(step)
    assert len(set(places)) == 2  # one for the input, one for the output


def test_record_nested_raises():
    with pytest.raises(RuntimeError, match="already"):
        native.record(lambda: native.record(lambda: torch.zeros(1)).replay(1))
    assert native.empty(2, dtype=torch.float32).shape == (2,)


def test_record_ignores_calls_of_other_threads():
    """Each of two threads records while the other one calls and records."""
    weights = [PackedWeight.pack(randn(64, 64, seed=i) / 8) for i in range(3)]
    x = randn(5, 64)
    expected = chain(x, weights)
    programs: list[native.Program] = []
    called: list[torch.Tensor] = []

    def record_another() -> None:
        called.append(chain(x, weights))
        programs.append(native.record(lambda: chain(x, weights)))
        called.append(chain(x, weights))

    def step() -> torch.Tensor:
        between = chain(x, weights[:1])
        other = threading.Thread(target=record_another)
        other.start()
        other.join()
        return chain(between, weights[1:])

    programs.append(native.record(step))
    for program in programs:
        assert torch.equal(program.replay(5), expected)
        assert len(program.replay_timed(5)[1]) == 3
    assert [torch.equal(result, expected) for result in called] == [True, True]


X, GAMMA = torch.ones(4, 8), torch.ones(8)

REFUSED: dict[str, Callable[[], object]] = {  # by name: as torch calls it outside and inside inference mode
    "mul": lambda: norm(X * 3, GAMMA),
    "gt": lambda: bool(X[0, 0] > 0),
    "copy_": lambda: X.copy_(GAMMA),
    "zero_": lambda: norm(X, GAMMA).zero_(),
    "zeros": lambda: torch.zeros(4),
    "arange": lambda: torch.arange(4),
    "cat": lambda: torch.cat([X, X]),
    "clone|contiguous": lambda: X.t().contiguous(),
    "clone|reshape": lambda: X.t().reshape(-1),
    "_to_copy|to": lambda: X.to(torch.float64),
    "mm|linear": lambda: torch.nn.functional.linear(X, X),
    "_local_scalar_dense|item": lambda: X[0, 0].item(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_record_computing_torch_operation_is_refused(name, inference):
    """The error names the operation, file and line."""
    work = REFUSED[name]
    line = work.__code__.co_firstlineno
    message = rf"^aten\.({name})\.\w+ at .*test_program\.py:{line}: "
    with torch.inference_mode(inference), pytest.raises(native.NotRecordable, match=message):
        native.record(work)  # type: ignore[arg-type]
    assert torch.equal(X * 1, torch.ones(4, 8))  # nothing is refused afterwards


def test_record_refuses_copy_within_a_kernel():
    """Packed weights take contiguous ids; the error names the line of the kernel that copies others."""
    packed, ids = PackedWeight.pack(randn(16, 8)), torch.arange(8)
    native.record(lambda: packed.rows(ids))
    with pytest.raises(native.NotRecordable, match=r"packed\.py:\d+"):
        native.record(lambda: packed.rows(ids[::2]))


def test_cpu_backend_capture_of_torch_operation_raises_capture_error():
    with pytest.raises(CaptureError, match=r"aten\.mul\.Tensor at .*test_program\.py"):
        CpuBackend().capture(lambda rows: norm(X[:rows] * 3, GAMMA), 4, decode=False)


@pytest.mark.parametrize("inference", [False, True])
def test_record_views_and_allocations_are_allowed(inference):
    x, gamma = randn(4, 8), randn(8)

    def step() -> torch.Tensor:
        _, second = x.view(2, 16).reshape(4, 8).contiguous().split([2, 2])
        out = torch.empty_like(second)
        sizes = list(second.to(torch.float32).shape)
        native.call("rms_norm", ("rms_norm", torch.float32, [second, None, gamma, out], sizes, [1e-6, 0.0]))
        return out

    with torch.inference_mode(inference):
        program = native.record(step)
        x.mul_(2).add_(1)
        assert torch.equal(program.replay(2), norm(x[2:], gamma))


@pytest.mark.parametrize("inference", [False, True])
def test_program_view_of_dropped_output_keeps_its_memory(inference):
    x, other, gamma = randn(4, 8), randn(4, 8, seed=1), torch.ones(8)

    def step() -> torch.Tensor:
        view = norm(x, gamma).view(8, 4)[:]
        norm(other, gamma)  # would take the memory of the view
        return norm(view.view(4, 8), gamma)

    with torch.inference_mode(inference):
        program = native.record(step)
        assert torch.equal(program.replay(4), norm(norm(x, gamma), gamma))


def test_program_keeps_tensors_of_its_calls():
    """Tensors that only the recorded function held, and constants."""
    x = randn(4, 8)
    program = native.record(lambda: norm(norm(x, torch.tensor([0.5] * 8)), torch.tensor([2.0] * 8)))
    others = [torch.full((8,), 7.0) for _ in range(100)]  # take the memory of freed tensors
    assert torch.equal(program.replay(4), norm(norm(x, torch.tensor([0.5] * 8)), torch.tensor([2.0] * 8)))
    assert len(others) == 100


IMPORTS = """
import sys, torch
from npuserve.kernels import native
x = torch.ones(4)
native.record(lambda: x.view(2, 2)[:1])
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_record_imports_no_dynamo():
    """The import would take a second of each start."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
