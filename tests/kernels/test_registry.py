"""Choice of implementations, and timing of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npuserve.kernels.registry import GOLDEN, KERNELS, Case, HostSpan, Implementation, Kernel, KernelSet, kernel


def seven(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.full((len(gate_up), gate_up.shape[1] // 2), 7.0)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend with one kernel of its own."""
    monkeypatch.setitem(KERNELS["swiglu"].implementations, "other", Implementation(seven))
    return "other"


def test_kernel_set_lists_exactly_the_kernels() -> None:
    assert set(KernelSet.__annotations__) == set(KERNELS)
    assert all(k.name == name and k.cases for name, k in KERNELS.items())
    for k in KERNELS.values():
        names = [case.name for case in k.cases]
        assert len(set(names)) == len(names), k.name
        assert any(case.benchmark for case in k.cases), k.name
        assert any(not case.benchmark for case in k.cases), k.name


def test_kernel_sets_are_independent(other: str) -> None:
    x = torch.ones(2, 6)
    own, plain = KernelSet(other), KernelSet("none")
    assert own.swiglu(x).tolist() == [[7.0] * 3] * 2
    torch.testing.assert_close(plain.swiglu(x), KERNELS["swiglu"](x))
    assert own.labels["swiglu"] == other
    assert plain.labels["swiglu"] == GOLDEN


def test_fallbacks_are_the_kernels_without_an_implementation(other: str) -> None:
    needed = {name for name, k in KERNELS.items() if not (k.optional or k.by_layer)}
    assert sorted(KernelSet(other).fallbacks) == sorted(needed - {"swiglu"})
    assert sorted(KernelSet("none").fallbacks) == sorted(needed)
    assert sorted(KernelSet("none", layer_kernels=["sigmoid_gate"]).fallbacks) == sorted({*needed, "sigmoid_gate"})


def test_optional_kernel_without_an_implementation_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KernelSet("none")
    assert plain.decoder_layers(1, 2) is None
    assert "decoder_layers" not in plain.labels
    with plain.timed("decode") as timings:
        plain.decoder_layers()
    assert timings.spans == []
    taken = iter([None, torch.ones(1)])
    monkeypatch.setitem(KERNELS["decoder_layers"].implementations, "other", Implementation(lambda: next(taken)))
    other = KernelSet("other")
    assert other.labels["decoder_layers"] == "other"
    with other.timed("decode") as timings:
        assert other.decoder_layers() is None
        assert other.decoder_layers().tolist() == [1.0]
    assert [name for name, _ in timings.spans] == ["decoder_layers"]
    assert KernelSet("other", fuse=False).decoder_layers() is None


def test_own_function_of_a_backend_replaces_its_implementation(other: str) -> None:
    k = KernelSet(other, own={"swiglu": lambda x: x + 1})
    x = torch.zeros(1, 4)
    assert torch.equal(k.swiglu(x), x + 1)
    with k.timed("decode") as timings:
        assert torch.equal(k.swiglu(x), x + 1)
    assert [name for name, _ in timings.spans] == ["swiglu"]
    assert not torch.equal(KernelSet(other).swiglu(x), x + 1)


def test_timed_calls_are_observed_once_read(other: str) -> None:
    seen: list[tuple[str, str, str, float]] = []
    k = KernelSet(other, lambda *call: seen.append(call))
    x = torch.ones(1, 4)
    k.swiglu(x)
    with k.timed("decode") as timings:
        k.swiglu(x)
        k.greedy(x, vocabulary=4)
    k.swiglu(x)
    assert seen == []
    timings.report()
    timings.report()
    assert [call[:3] for call in seen] == [("swiglu", "decode", other), ("greedy", "decode", GOLDEN)]
    assert all(seconds >= 0 for *_, seconds in seen)


def test_untimed_calls_are_not_wrapped(other: str) -> None:
    k = KernelSet(other, lambda *_: None)
    assert k.swiglu is seven
    with pytest.raises(RuntimeError), k.timed("decode"):
        k.linear(torch.ones(1, 2), torch.ones(1, 3), None)
    assert k.swiglu is seven


def test_spans_are_of_the_given_clock() -> None:
    class Ticks:
        def __init__(self) -> None:
            log.append("start")

        def stop(self) -> None:
            log.append("stop")

        def read(self) -> float:
            log.append("read")
            return 0.25

    log: list[str] = []
    seen: list[tuple[Any, ...]] = []
    k = KernelSet("none", lambda *call: seen.append(call), Ticks)
    with k.timed("prefill") as timings:
        k.greedy(torch.ones(1, 4), 4)
        k.greedy(torch.ones(1, 4), 4)
    timings.report()
    assert log == ["start", "stop", "start", "stop", "read", "read"]
    assert seen == [("greedy", "prefill", GOLDEN, 0.25)] * 2


def test_timed_step_without_observer_reports_nothing() -> None:
    k = KernelSet("none")
    with k.timed("decode") as timings:
        k.greedy(torch.ones(1, 4), 4)
    timings.report()
    assert timings.spans == []


def test_host_spans_nest() -> None:
    outer = HostSpan()
    inner = HostSpan()
    inner.stop()
    outer.stop()
    assert 0 <= inner.read() <= outer.read()


def test_duplicate_names_raise() -> None:
    with pytest.raises(ValueError, match="a second kernel named swiglu"):
        kernel("swiglu", cases=[])(seven)
    case = Case("one", lambda generator, dtype: (torch.ones(1, 2, dtype=dtype),))
    own = Kernel("own", seven, [case], (torch.float32,))
    own.implementation("cpu")(seven)
    with pytest.raises(ValueError, match="kernel own: a second implementation for cpu"):
        own.implementation("cpu")(seven)
