"""Acceptance measurements on the emulated NPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from npuserve.cli.acceptance import captures, latency, reference
from npuserve.cli.acceptance.captures import chunk_buckets
from npuserve.npu import storyteller
from npuserve.npu.backends import select
from npuserve.npu.backends.base import DeviceSettings
from tests.npu.emulator.child import emulated

RELAX = ("fp32", "small_heads")


@emulated(relax=RELAX)
def test_buckets_on_ascend_report_wrong_lengths() -> None:
    from npuserve.npu.backends.ascend.captured_graph import Lengths
    from npuserve.npu.backends.ascend.native_lengths import NativeLengths

    backend, put = select("npu", RELAX, DeviceSettings(decode_buckets=(2, 4))), NativeLengths.put
    loaded = reference.load(storyteller.FOLDER, backend, "bfloat16", max_model_len=64, max_num_seqs=4,
                             max_num_batched_tokens=16)
    right = list(captures.buckets(loaded, 4))
    assert [x.rows for x in right] == [4, 2]
    assert all(x.difference == 0 and x.padded_difference < 0.05 for x in right)
    assert all(min(x.seconds, x.replay_seconds, x.single_seconds) > 0 for x in right)

    def off(self: NativeLengths, graph: object, lengths: Lengths, *more: object) -> None:
        put(self, graph, {name: [max(1, n - 1) for n in values] for name, values in lengths.items()},
            *more)  # type: ignore[arg-type]

    NativeLengths.put = off  # type: ignore[assignment]
    try:
        wrong = list(captures.buckets(loaded, 4))
    finally:
        NativeLengths.put = put  # type: ignore[method-assign]
    assert all(x.difference > 0.2 for x in wrong)


@emulated(relax=RELAX)
@mock.patch.object(captures, "CHUNK_TOKENS", 130)
def test_chunk_buckets_on_ascend_report_wrong_lengths_and_ends() -> None:
    from npuserve.npu.backends.ascend.captured_graph import Lengths
    from npuserve.npu.backends.ascend.native_lengths import NativeLengths

    backend, put = select("npu", RELAX), NativeLengths.put
    loaded = reference.load(storyteller.FOLDER, backend, "bfloat16", max_model_len=64, max_num_seqs=4,
                             max_num_batched_tokens=16)
    right = list(chunk_buckets(loaded))
    assert [x.tokens for x in right] == [64, 128, 130]
    assert all(max(x.difference, x.long_difference) < 0.05 for x in right)
    for name, change in (("actual_seq_lengths_kv", -1), ("actual_seq_lengths", 1)):

        def off(self: NativeLengths, graph: object, lengths: Lengths, *more: object) -> None:
            first, *others = lengths[name]  # noqa: B023
            put(self, graph, {**lengths, name: [first + change, *others]}, *more)  # type: ignore[arg-type] # noqa: B023

        NativeLengths.put = off  # type: ignore[assignment]
        try:
            wrong = list(chunk_buckets(loaded))
        finally:
            NativeLengths.put = put  # type: ignore[method-assign]
        assert all(x.difference > 0.2 for x in wrong), wrong
    backend.settings = replace(backend.settings, capture_chunks=False)
    assert list(chunk_buckets(loaded)) == []


@emulated(relax=RELAX)
def test_bandwidth_on_ascend() -> None:
    assert latency.bandwidth(select("npu", RELAX)) > 0
