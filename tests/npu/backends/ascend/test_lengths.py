"""Updates of the lengths of captured attention on the emulated device: by the native library, and from Python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.kernels.native.binding import BINDING
from npuserve.npu import emulator
from npuserve.npu.backends.ascend import native_lengths
from npuserve.npu.backends.ascend.backend import AscendBackend
from npuserve.npu.backends.ascend.graphs import AscendGraphs
from npuserve.npu.backends.ascend.lengths import LengthThread
from npuserve.npu.backends.ascend.native_lengths import NativeLengths, UnsupportedCall
from npuserve.npu.backends.faults import Fault
from npuserve.npu.step import NewRequest, Row, Step
from tests.npu.backends.ascend.test_backend import RELAX, equal_to_the_cpu, let_go, load, started
from tests.npu.backends.small import GREEDY, answers, asks, saved
from tests.npu.emulator.child import emulated


@contextmanager
def updated_from_python() -> Iterator[None]:
    """Make backends started in the context update lengths through torch_npu, as without the native library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_lengths, "BINDING", None)
        yield


UPDATERS = pytest.mark.parametrize("updater", [NativeLengths, LengthThread])


def using(updater: type) -> AbstractContextManager[None]:
    return updated_from_python() if updater is LengthThread else nullcontext()


class Attention:
    """Graphs of one row's attention over a cache whose values are their slot numbers: a context of n tokens yields the
    mean of the first n slots. calls: number of calls of attention, whose results are concatenated."""

    def __init__(self, backend: AscendBackend, calls: int = 1):
        from npuserve.kernels.attention import AttentionMetadata, paged_attention

        slots = torch.arange(128.0)[:, None, None].expand(128, 1, 128).contiguous().to(torch.float16)
        values, keys, q = slots[None].to("npu"), torch.zeros(1, 128, 1, 128).half().to("npu"), torch.ones(1, 1, 128)
        q, tables = q.half().to("npu"), torch.zeros(1, 1, dtype=torch.int32).to("npu")
        attend, metadata = (
            paged_attention.implementations["ascend"].function, AttentionMetadata.from_lengths(tables, [1], [1]))
        made = backend.capture(lambda rows: torch.cat(
            [attend(q, keys, values, metadata, 1.0).view(1, 128) for _ in range(calls)], 1), 1, decode=True)
        self._keep = keys, values, q, metadata
        assert isinstance(made, AscendGraphs)
        self.backend, self.lengths, self.graph = backend, backend._lengths, made._graphs[1].graph
        self.graphs, self.replay = made, made.replay

    def of(self, *lengths: int) -> Iterator[float]:
        """Yield the results of consecutive replays, whose lengths are all requested before any of them runs."""
        buffers = [self.backend.host_buffer(1, 128, dtype=torch.float16) for _ in lengths]
        events = [self.backend.fetch(self.replay(1, [n]), buffer) for n, buffer in zip(lengths, buffers, strict=True)]
        self.lengths.check(self.lengths.given)
        self.graph.graph_dispatch_mode.update_stream.synchronize()
        for event, buffer in zip(events, buffers, strict=True):
            event.wait()
            yield float(buffer[0, 0])


@UPDATERS
@emulated()
def test_ascend_replays_use_their_own_lengths(updater: type) -> None:
    with using(updater):
        attention = Attention(started())
    assert list(attention.of(1, 3, 128)) == [0.0, 1.0, 63.5]
    for n in (5, 99, 2, 64):
        assert list(attention.of(n)) == [(n - 1) / 2]


@UPDATERS
@emulated()
def test_ascend_batches_of_a_step_have_their_own_lengths(updater: type) -> None:
    """Of four calls of attention, two belong to the first batch, and two to the second."""
    with using(updater):
        attention = Attention(started(), calls=4)
    backend = attention.backend
    for first, second in ((3, 128), (64, 5)):
        buffer = backend.host_buffer(1, 4 * 128, dtype=torch.float16)
        event = backend.fetch(attention.replay(1, [first], (), [([second], ())]), buffer)
        attention.lengths.check(attention.lengths.given)
        attention.graph.graph_dispatch_mode.update_stream.synchronize()
        event.wait()
        assert buffer[0, ::128].tolist() == [(n - 1) / 2 for n in (first, first, second, second)]
    with pytest.raises(ValueError, match="2 context lengths for a graph of 1 rows"):
        attention.replay(1, [1], (), [([1, 1], ())])
    with pytest.raises(ValueError, match="lengths of 3 batches for 4 calls of attention"):
        attention.replay(1, [1], (), [([1], ())] * 2)


@emulated(fresh=True)
def test_ascend_lengths_without_wait_for_last_replay_are_wrong() -> None:
    """Without the wait the first replay reads the lengths of the second, which then waits forever for its own."""
    with updated_from_python():
        attention = Attention(started())
    ends = next(iter(attention.graphs._graphs.values())).handle
    type(ends).replays = property(lambda self: 0, lambda self, value: None)  # type: ignore[assignment]
    assert next(attention.of(1, 3)) == 1.0
    attention.graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [3]}])  # releases the second replay


@emulated()
def test_ascend_lengths_are_updated_while_python_holds_its_lock() -> None:
    attention = Attention(started())
    native = attention.lengths
    assert isinstance(native, NativeLengths)
    done = ctypes.PyDLL(native._lib._name).npuserve_lengths_wait  # PyDLL keeps the lock
    done.argtypes = native._lib.npuserve_lengths_wait.argtypes
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no other thread of Python gets the lock while this one waits
    try:
        attention.replay(1, [64])
        assert done(native._updater, native.given, None, 0) == 0
    finally:
        sys.setswitchinterval(interval)


@emulated(relax=RELAX)
def test_ascend_lengths_from_python_give_tokens_of_cpu(tmp_path: Path) -> None:
    with updated_from_python():
        equal_to_the_cpu(tmp_path, {})


@pytest.mark.parametrize("captures", [0, 1])
@emulated(relax=RELAX)
def test_ascend_unsupported_call_is_updated_from_python(tmp_path: Path, captures: int) -> None:
    """The test at the start succeeds, and the model's attention has an argument that the native library lacks. If it
    serves captured steps already, no further one is captured: two threads must not update lengths."""
    saved(tmp_path)
    add, added = NativeLengths.add, []

    def refuse_later(self: NativeLengths, graph: Any) -> None:
        added.append(graph)
        if len(added) > 1 + captures:
            raise native_lengths.UnsupportedCall("actual_shared_prefix_len")
        add(self, graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeLengths, "add", refuse_later)
        runner = load(tmp_path, decode_buckets=(4,))
    assert isinstance(runner.backend, AscendBackend)
    assert isinstance(runner.backend._lengths, NativeLengths if captures else LengthThread)
    assert (runner._dispatch.decodes.argmax is None) == (captures > 0)
    assert answers(runner, asks(3, 4))[0] == answers(load(tmp_path, "cpu", block_size=128, threads=1), asks(3, 4))[0]


@UPDATERS
@emulated(fresh=True)
def test_ascend_failed_length_update_raises_device_error(tmp_path: Path, updater: type) -> None:
    """The step raises the error instead of waiting forever for the lengths."""
    saved(tmp_path)
    with using(updater):
        runner = load(tmp_path, dtype="bfloat16")
    runner.collect(runner.launch(Step([Row(1, [1, 2], 0, [0], True)], [NewRequest(1, [1, 2], [], GREEDY)])))
    emulator.fail("aclmdlRICaptureTaskUpdateBegin", 507899)
    launched = runner.launch(Step([Row(1, [3], 2, [0], True)]))
    with pytest.raises(RuntimeError, match="507899") as raised:
        runner.collect(launched)
    assert AscendBackend.errors.fault(raised.value) is Fault.NODE
    with pytest.raises(RuntimeError, match="507899"):
        runner.backend.synchronize()
    let_go()


@emulated(fresh=True)
def test_ascend_update_that_needs_more_workspace_than_was_captured_fails(tmp_path: Path) -> None:
    """It would write beyond the workspace. The next engine captures nothing."""
    saved(tmp_path)
    runner = load(tmp_path, dtype="bfloat16")
    with emulator.defects("large_update"):
        launched = runner.launch(Step([Row(1, [1, 2], 0, [0], True)], [NewRequest(1, [1, 2], [], GREEDY)]))
        said = r"new lengths need a workspace of \d+ bytes, and \d+ were captured"
        with pytest.raises(RuntimeError, match=said) as raised:
            runner.collect(launched)
    assert AscendBackend.errors.is_capture_error(raised.value)
    assert AscendBackend.errors.fault(raised.value) is Fault.ENGINE
    let_go()


@emulated()
def test_native_lengths_find_attention_where_torch_npu_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In libopapi_transformer, as in CANN: libopapi has other operators."""
    name = "aclnnFusedInferAttentionScoreV3"
    assert not hasattr(ctypes.CDLL("libopapi.so"), name)
    addresses = dict(zip((*native_lengths.OPERATORS, *native_lengths.CACHES), native_lengths._operator_functions(),
                         strict=True))
    library = ctypes.CDLL("libopapi_transformer.so")
    assert addresses[name] == ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert isinstance(started()._lengths, NativeLengths)
    monkeypatch.setattr(native_lengths, "OPERATORS", (*native_lengths.OPERATORS, "aclnnNone"))
    with pytest.raises(UnsupportedCall, match="CANN lacks aclnnNone"):
        native_lengths._operator_functions()


@pytest.mark.parametrize(("torch_npu", "cann", "message"), [
    ("2.9.0.post1", "9.2.0", r"torch_npu 2\.9\.0\.post1 may record external events, .* 2\.10\.0\.post4 and 2\.13\.0"),
    ("2.14.0", "9.2.0", r"torch_npu 2\.14\.0 may record"),
    ("2.13.0", "8.3.RC1", r"attention of CANN 8\.3\.RC1 may take other arguments; .* is 8\.5 to 9\.2"),
    ("2.13.0", "9.3.0", r"attention of CANN 9\.3\.0 may take other"),
    ("2.10.0.post4", "9.2.0", r"examined with torch_npu 2\.10\.0\.post4 is 9\.1$"),
    ("2.13.0", "", "CANN's version cannot be read"),
])
def test_native_lengths_of_unexamined_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, torch_npu: str, cann: str, message: str
) -> None:
    """Other versions may take the arguments of attention in another order, which would corrupt memory."""
    monkeypatch.setattr(native_lengths, "version", lambda name: torch_npu)
    with pytest.raises(UnsupportedCall, match=message):
        NativeLengths(None, cann)


@pytest.mark.parametrize(("torch_npu", "cann"), [
    ("2.13.0", "8.5.0"), ("2.13.0+git1", "9.2.RC1"), ("2.10.0.post4", "9.1.0")])
def test_native_lengths_of_examined_versions_are_accepted(torch_npu: str, cann: str) -> None:
    native_lengths._check_versions(torch_npu, cann)


@pytest.mark.skipif(BINDING is None, reason="the native library is not built")
@pytest.mark.parametrize("failing", range(4))
def test_native_lengths_without_an_event_keep_nothing_of_the_graph(failing: int) -> None:
    """With functions in place of CANN's: all events that were created are destroyed."""
    live: list[int] = []
    handle = ctypes.c_void_p

    def create(event: Any, flags: int) -> int:
        if len(live) == failing:
            return 207008
        live.append(len(live) + 1)
        event[0] = live[-1]
        return 0

    def destroy(event: int) -> int:
        live.remove(event)
        return 0

    done = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    names = (*native_lengths.RUNTIME, *native_lengths.OPERATORS, *native_lengths.CACHES)
    made = dict.fromkeys(names, done) | {
        "aclrtSetCurrentContext": ctypes.CFUNCTYPE(ctypes.c_int, handle)(lambda context: 0),
        "aclrtCreateEventExWithFlag": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(handle), ctypes.c_uint32)(create),
        "aclrtDestroyEvent": ctypes.CFUNCTYPE(ctypes.c_int, handle)(destroy)}
    functions = (handle * len(made))(*(ctypes.cast(function, handle).value for function in made.values()))
    updater, graph = handle(), handle()
    assert BINDING is not None
    assert BINDING.npuserve_lengths_open(functions, None, ctypes.byref(updater)) == 0
    assert BINDING.npuserve_lengths_add(updater, None, 0, ctypes.byref(graph)) == 207008
    BINDING.npuserve_lengths_close(updater)
    assert (live, graph.value) == ([], None)
