"""Updates of the lengths of captured attention in C++: one call from Python for all layers of a step.

The thread and its loop over the layers are C++ (kernels/native/ascend/lengths.cpp), part of the native library, and
call CANN directly. torch_npu's own update (`NPUGraph.update`) is a Python loop with five calls a layer, measured at
184 us a layer (https://github.com/vllm-project/vllm-ascend/issues/13058). It holds the interpreter lock, and each of
its calls waits until the queue that torch_npu shares between threads is empty. The alternatives were examined:

- An extension against torch_npu's headers binds a wheel to one version of torch and of Python, and its calls still
  wait for the shared queue. The functions of CANN are C with a documented interface. Python resolves them by name at
  the start, so the library needs neither CANN nor torch to build or to load.
- Lengths in device memory: fused attention of torch_npu takes host arrays only (schema of
  npu_fused_infer_attention_score). xLLM fills a tiling tensor for an operator of its own
  (https://github.com/jd-opensource/xllm/blob/87e8d6ed619bfbf96c467d2465392abe16b58576/xllm/core/layers/npu_torch/attention.cpp#L147).

torch_npu captures the calls. Their arguments are read from its records once per graph, after the capture, and passed
in the order of op-plugin's call
(https://github.com/Ascend/op-plugin/blob/517f2e7d0f202f38b76310706cb977ca2388ad21/op_plugin/ops/opapi/FusedInferAttentionScoreKernelNpuOpApi.cpp#L508).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.native.binding import BINDING
from npuserve.npu.backends.ascend import functions
from npuserve.npu.backends.ascend.captured_graph import MAX_LAGS, CapturedGraph, Lengths
from npuserve.npu.backends.ascend.fault_codes import AclError, check
from npuserve.npu.cann.versions import PAIRS, fits_cann, pair_of

RUNTIME = (
    "aclrtSetCurrentContext", "aclrtCreateStreamWithConfig", "aclrtDestroyStream", "aclrtCreateEventExWithFlag",
    "aclrtDestroyEvent", "aclrtRecordEvent", "aclrtValueWrite", "aclrtStreamWaitEvent",
    "aclmdlRICaptureTaskUpdateBegin", "aclmdlRICaptureTaskUpdateEnd", "aclGetRecentErrMsg")
OPERATORS = (
    "aclCreateTensor", "aclCreateTensorList", "aclCreateIntArray", "aclDestroyTensor", "aclDestroyTensorList",
    "aclDestroyIntArray", "aclnnFusedInferAttentionScoreV3GetWorkspaceSize", "aclnnFusedInferAttentionScoreV3")
CACHES = (
    "InitPTACacheThreadLocal", "SetPTAHashKey", "UnInitPTACacheThreadLocal", "InitHugeMemThreadLocal",
    "UnInitHugeMemThreadLocal", "ReleaseHugeMem")
"""Functions of libascendcl, of the libraries of operators, and those among them that a CANN may lack, in the order of
`Functions` in lengths.cpp. torch_npu calls the last ones around each call of an operator, also in an update
([update_op_api_common.h](https://github.com/Ascend/op-plugin/blob/517f2e7d0f202f38b76310706cb977ca2388ad21/op_plugin/utils/custom_functions/opapi/update_op_api_common.h#L24)):
they reset the thread's cache of executors, and free its memory for large arguments."""

EXAMINED = tuple(PAIRS)
"""Versions of torch_npu that were examined. External events are flags in device memory where CANN has both
aclrtValueWait and aclrtValueWrite, else events, in
[2.10.0.post4](https://github.com/Ascend/pytorch/blob/5dd8ef3f9b375b5ae4a83538d5785754148c3302/torch_npu/csrc/core/npu/interface/AclInterface.cpp#L308)
as in [later ones](https://github.com/Ascend/pytorch/blob/9e73e708ab9350d203475609f36f8a43f6a0c2ab/torch_npu/csrc/core/npu/interface/AclInterface.cpp#L316).
The call of op-plugin is the same in both, too. Each calls its versions of CANN (`cann/versions.py`) with these
arguments, so the order holds for them. Another version may have another order, with which the call would corrupt
memory."""

TENSORS = (
    "query", "key", "value", "pse_shift", "atten_mask", "dequant_scale1", "quant_scale1", "dequant_scale2",
    "quant_scale2", "quant_offset2", "antiquant_scale", "antiquant_offset", "block_table", "query_padding_size",
    "kv_padding_size", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale",
    "value_antiquant_offset", "key_shared_prefix", "value_shared_prefix", "query_rope", "key_rope",
    "key_rope_antiquant_scale")
INTEGERS = (
    "num_heads", "pre_tokens", "next_tokens", "num_key_value_heads", "sparse_mode", "inner_precise", "block_size",
    "antiquant_mode", "softmax_lse_flag", "key_antiquant_mode", "value_antiquant_mode")
"""Arguments of npu_fused_infer_attention_score in the order of `Call` in lengths.cpp."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.uint8: 4, torch.int64: 9,
          torch.bool: 12, torch.bfloat16: 27}
"""aclDataType (acl_base.h)."""

ND = 2
NCL = 47
NCHW = 0
"""aclFormat (acl_base.h). op-plugin names tensors of three and four dimensions NCL and NCHW (op_api_common)."""

CALL = "npu_fused_infer_attention_score"
MAX_DIMENSIONS = 8


class UnsupportedCall(Exception):
    """Captured call that `NativeLengths` cannot update."""


class _Tensor(ctypes.Structure):
    _fields_ = [("given", ctypes.c_int64), ("data", ctypes.c_void_p), ("dims", ctypes.c_int64),
                ("sizes", ctypes.c_int64 * MAX_DIMENSIONS), ("strides", ctypes.c_int64 * MAX_DIMENSIONS),
                ("offset", ctypes.c_int64), ("storage", ctypes.c_int64), ("dtype", ctypes.c_int64),
                ("format", ctypes.c_int64)]


class _Call(ctypes.Structure):
    _fields_ = [("group", ctypes.c_void_p), ("event", ctypes.c_void_p), ("tensors", _Tensor * (len(TENSORS) + 2)),
                ("ends_count", ctypes.c_int64), ("ends", ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in INTEGERS), ("scale", ctypes.c_double),
                ("layout", ctypes.c_char * 16), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64)]


class NativeLengths:
    """Thread in C++ that updates the lengths of graphs. It runs until `close`. See `LengthUpdates`.

    stream: stream of the replays.
    cann: version of CANN; "" if it is unknown.

    Raises UnsupportedCall if this machine lacks the native library or a function of CANN, or has a version of torch_npu
    or CANN that was not examined.
    """

    def __init__(self, stream: Any, cann: str):
        if BINDING is None:
            raise UnsupportedCall("the native library is not built")
        if BINDING.npuserve_lengths_call_bytes() != ctypes.sizeof(_Call):
            raise UnsupportedCall("the native library is built from other sources")
        _check_versions(version("torch_npu"), cann)
        self._lib = BINDING
        acl = functions.runtime()
        pointers = [*_runtime_functions(acl), *_operator_functions()]
        addresses = (ctypes.c_void_p * len(pointers))(*pointers)
        context = ctypes.c_void_p()
        updater = ctypes.c_void_p()
        check(acl.aclrtGetCurrentContext(ctypes.byref(context)), "aclrtGetCurrentContext")
        check(self._lib.npuserve_lengths_open(addresses, context, ctypes.byref(updater)), "aclrtCreateStreamWithConfig")
        self._updater: int | None = updater.value
        self._stream = ctypes.c_void_p(stream.npu_stream)
        self._lags = (ctypes.c_double * MAX_LAGS)()
        self.given = 0

    def add(self, graph: CapturedGraph) -> None:
        """Read the graph's calls. Raises UnsupportedCall."""
        records = graph.records
        calls = (_Call * len(records))()
        handle = ctypes.c_void_p()
        keep = [_fill(call, record) for call, record in zip(calls, records, strict=True)]
        check(self._lib.npuserve_lengths_add(self._updater, calls, len(records), ctypes.byref(handle)),
               "aclrtCreateEventExWithFlag")
        del keep  # copied
        graph.handle = handle.value

    def put(self, graph: CapturedGraph, *lengths: Lengths) -> None:
        contexts = array("q", chain.from_iterable(each["actual_seq_lengths_kv"] for each in lengths))
        ends = array("q", chain.from_iterable(each.get("actual_seq_lengths", ()) for each in lengths))
        batches = len(lengths)
        self.given += 1
        self._lib.npuserve_lengths_put(
            self._updater, graph.handle, contexts.buffer_info()[0], len(contexts) // batches, ends.buffer_info()[0],
            len(ends) // batches, batches)

    def replayed(self, graph: CapturedGraph) -> None:
        """Record the event directly: a replay empties torch_npu's queue before it launches the graph."""
        check(self._lib.npuserve_lengths_replayed(self._updater, graph.handle, self._stream), "aclrtRecordEvent")

    def check(self, given: int) -> None:
        text = ctypes.create_string_buffer(1024)
        if self._lib.npuserve_lengths_wait(self._updater, given, text, len(text)):
            raise AclError(text.value.decode(errors="replace"))

    @property
    def native_id(self) -> int:
        return 0 if self._updater is None else int(self._lib.npuserve_lengths_thread(self._updater))

    def take_lags(self) -> Sequence[float]:
        if self._updater is None:
            return ()
        return self._lags[: self._lib.npuserve_lengths_lags(self._updater, self._lags, MAX_LAGS)]

    def close(self) -> None:
        if self._updater is not None:
            self._lib.npuserve_lengths_close(self._updater)
            self._updater = None


def _runtime_functions(acl: ctypes.CDLL) -> list[int | None]:
    """Return the addresses of RUNTIME; None for aclrtValueWrite where external events are events.

    Raises UnsupportedCall for a missing one.
    """
    flags = hasattr(acl, "aclrtValueWait") and hasattr(acl, "aclrtValueWrite")
    try:
        return [None if name == "aclrtValueWrite" and not flags else
                ctypes.cast(getattr(acl, name), ctypes.c_void_p).value for name in RUNTIME]
    except AttributeError as error:
        raise UnsupportedCall(str(error)) from None


def _operator_functions() -> list[int | None]:
    """Return the addresses of OPERATORS and CACHES, found as torch_npu finds them. A missing one of CACHES is None.

    Raises UnsupportedCall for one of OPERATORS that is missing.
    """
    try:
        addresses = functions.addresses((*OPERATORS, *CACHES))
    except LookupError as error:
        raise UnsupportedCall(str(error)) from None
    if missing := [name for name in OPERATORS if not addresses[name]]:
        raise UnsupportedCall(f"CANN lacks {', '.join(missing)}")
    return list(addresses.values())


def _check_versions(torch_npu: str, cann: str) -> None:
    """Raise UnsupportedCall unless the versions were examined."""
    pair = pair_of(torch_npu)
    if pair is None:
        raise UnsupportedCall(f"torch_npu {torch_npu} may record external events, or call attention, in another way; "
                              f"examined are {' and '.join(EXAMINED)}")
    if not cann:
        raise UnsupportedCall("CANN's version cannot be read: source its set_env.sh, which sets ASCEND_HOME_PATH")
    if not fits_cann(pair, cann):
        raise UnsupportedCall(f"attention of CANN {cann} may take other arguments; examined with torch_npu {torch_npu} "
                              f"is {' to '.join(dict.fromkeys(pair.cann))}")


def _fill(call: _Call, record: Any) -> Any:
    """Write a record of torch_npu to `call`; return what must live until the call is copied. Raises UnsupportedCall."""
    schema = record.op_cache_entry._schema
    if schema.name != f"npu::{CALL}" or schema.overload_name != "out":
        raise UnsupportedCall(f"{schema.name}.{schema.overload_name}")
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= dict(zip(values, record.args, strict=False)) | record.kwargs
    if values["actual_shared_prefix_len"] is not None:
        raise UnsupportedCall("actual_shared_prefix_len")
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    call.group = get_pointer(record.handle.task_group, None)
    call.event = record.event.npu_event
    for place, tensor in enumerate([*(values[name] for name in TENSORS), *values["out"]]):
        if tensor is not None:
            _describe(call.tensors[place], tensor)
    for name in INTEGERS:
        setattr(call, name, int(values[name]))
    ends = array("q", values["actual_seq_lengths"] or ())
    call.ends = ends.buffer_info()[0]
    call.ends_count = len(ends)
    call.scale = values["scale"]
    call.layout = values["input_layout"].encode()
    call.workspace = values["workspace"].data_ptr()
    call.workspace_bytes = values["workspace"].nbytes
    return ends


def _describe(record: _Tensor, tensor: Tensor) -> None:
    """Describe a tensor as op-plugin does."""
    dims = tensor.dim()
    if tensor.dtype not in DTYPES or dims > MAX_DIMENSIONS:
        raise UnsupportedCall(f"tensor {tensor.dtype} {list(tensor.shape)}")
    record.given = 1
    record.data = tensor.untyped_storage().data_ptr()
    record.offset = tensor.storage_offset()
    record.storage = tensor.untyped_storage().nbytes() // tensor.itemsize
    record.dims = dims
    record.sizes[:dims], record.strides[:dims] = tensor.shape, tensor.stride()
    record.dtype = DTYPES[tensor.dtype]
    record.format = {3: NCL, 4: NCHW}.get(dims, ND)
