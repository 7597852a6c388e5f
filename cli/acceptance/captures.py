"""Capture part of the acceptance check: each captured step compared with the same kernels one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from npuserve.cli.acceptance.report import Finding

if TYPE_CHECKING:
    from npuserve.npu.diagnostics.acceptance import Loaded

CAPTURE_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Maximum difference of a bucket's hidden states by dtype: the effect of other tilings of the same kernels. Wrong
lengths cause far larger differences."""


def check_captures(loaded: Loaded, largest: int) -> Iterator[Finding]:
    """Yield a finding for each bucket that the backend captures for up to `largest` rows: time, memory, difference.
    Then yield the difference of each captured size of steps with chunks."""
    from npuserve.npu.diagnostics.acceptance import buckets
    from npuserve.npu.diagnostics.chunk_captures import chunk_buckets

    tolerance = CAPTURE_TOLERANCE[loaded.runner.dtype_name]
    for bucket in buckets(loaded, largest):
        yield Finding(
            "capture", f"{bucket.rows} rows",
            f"{bucket.seconds:.2f} s, {bucket.nbytes / 2**20:.1f} MiB; {_equality(bucket.difference)}, padded "
            f"{bucket.padded_difference:.1e}; {bucket.replay_seconds * 1e3:.3f} ms, kernel by kernel "
            f"{bucket.single_seconds * 1e3:.3f} ms",
            max(bucket.difference, bucket.padded_difference) <= tolerance,
            {name: getattr(bucket, name) for name in bucket.__slots__},
            "the captured step and its kernels compute different results: serve with --decode-buckets without this "
            "size, and send this report")
    for mixed in chunk_buckets(loaded):
        yield Finding(
            "capture", f"{mixed.tokens} tokens",
            f"a decode row and a chunk: {_equality(mixed.difference)}, over 1,100 tokens and padded "
            f"{mixed.long_difference:.1e}", max(mixed.difference, mixed.long_difference) <= tolerance,
            {name: getattr(mixed, name) for name in mixed.__slots__},
            "the captured step and its kernels compute different results: serve with --no-capture-chunks, and send "
            "this report")


def _equality(difference: float) -> str:
    return f"difference {difference:.1e}" if difference else "the same bits"
