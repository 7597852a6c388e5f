"""Table of kernels: sums, order, and how a device's names get the bytes of the kernels that they compute."""

from __future__ import annotations

import pytest

from npuserve.npu.backends.ascend.profiler import NAMES, hardware_tasks
from npuserve.npu.backends.cuda.backend import KERNEL_NAMES
from npuserve.npu.backends.trace_profiler import cuda_kernels
from npuserve.npu.profile import KernelRow
from npuserve.npu.profiling.kernel_table import kernel_table


def test_rows_of_the_runners_kernels_are_sums_the_longest_first() -> None:
    calls = [("linear", 1.0), ("paged_attention", 4.0), ("linear", 2.0), ("linear_argmax", 0.5)]
    floor = {"linear": 30.0, "paged_attention": 7.0, "linear_argmax": 5.0}
    assert kernel_table(calls, floor) == [
        KernelRow("paged_attention", 1, 4.0, 7.0), KernelRow("linear", 2, 3.0, 30.0),
        KernelRow("linear_argmax", 1, 0.5, 5.0)]


def test_lm_head_of_sampled_steps_counts_as_linear() -> None:
    assert kernel_table([("linear", 1.0), ("sample", 1.0)], {"linear": 30.0, "linear_argmax": 5.0}) == [
        KernelRow("linear", 1, 1.0, 35.0), KernelRow("sample", 1, 1.0, 0.0)]


def test_names_of_one_group_share_its_floor_by_time_or_else_by_calls() -> None:
    floor = {"linear": 30.0, "linear_swiglu": 60.0, "linear_argmax": 10.0, "add_rms_norm": 4.0}
    timed = kernel_table([("MatMulV2", 3.0), ("QuantBatchMatmulV3", 1.0), ("AddRmsNorm", 1.0), ("Cast", 1.0)],
                         floor, NAMES)
    assert timed == [KernelRow("MatMulV2", 1, 3.0, 75.0), KernelRow("QuantBatchMatmulV3", 1, 1.0, 25.0),
                     KernelRow("AddRmsNorm", 1, 1.0, 4.0), KernelRow("Cast", 1, 1.0, 0.0)]
    untimed = kernel_table([("Cast", 0.0), ("aclnnMatmul", 0.0), ("aclnnMatmul", 0.0)], floor, NAMES)
    assert untimed == [KernelRow("Cast", 1, 0.0, 0.0), KernelRow("aclnnMatmul", 2, 0.0, 100.0)]


@pytest.mark.parametrize(("name", "kernels"), [
    ("rms_norm_kernel", "rms_norm,add_rms_norm"), ("qk_norm_rope_kv_write_kernel", "qk_norm_rope_kv_write"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear,linear_swiglu,linear_argmax"),
    ("product_kernel", "linear,linear_swiglu,linear_argmax"), ("sample_embed_kernel", None),
    ("chunk_products_kernel", "gated_delta_rule"), ("gated_rms_norm_kernel", "gated_rms_norm")])
def test_cuda_names_are_kernels(name: str, kernels: str | None) -> None:
    floor = dict.fromkeys((kernels or "").split(","), 2.0)
    (row,) = kernel_table([(name, 1.0)], floor, KERNEL_NAMES)
    assert row.floor_bytes == (2.0 * len(floor) if kernels else 0.0)


def test_kernels_of_device_traces_are_found_in_order() -> None:
    cuda = [{"ph": "X", "cat": "kernel", "name": "b", "ts": 5, "dur": 1},
            {"ph": "X", "cat": "cpu_op", "name": "c", "ts": 1, "dur": 9},
            {"ph": "X", "cat": "kernel", "name": "a", "ts": 2, "dur": 1}]
    assert [event["name"] for event in cuda_kernels(cuda)] == ["a", "b"]
    ascend = [{"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "Ascend Hardware"}},
              {"ph": "M", "name": "process_name", "pid": 8, "args": {"name": "CANN"}},
              {"ph": "X", "pid": 9, "name": "MatMulV2", "ts": "12.5", "dur": 3},
              {"ph": "X", "pid": 8, "name": "launch", "ts": "1.0", "dur": 3},
              {"ph": "X", "pid": 9, "name": "RmsNorm", "ts": "7.25", "dur": 3}]
    assert [event["name"] for event in hardware_tasks(ascend)] == ["RmsNorm", "MatMulV2"]
