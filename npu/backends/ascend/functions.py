"""CANN's libraries: the runtime, where torch_npu finds the operators, and those without which no model runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

LOOKUP = "_Z16GetOpApiFuncAddrPKc"
"""torch_npu's look-up of a function of the operators, which it exports: in user-defined libraries first, then in
$ASCEND_HOME_PATH/lib64/libopapi_*.so, of which libopapi_transformer.so has attention, then in libopapi.so
([op_api_common.cpp](https://github.com/Ascend/op-plugin/blob/517f2e7d0f202f38b76310706cb977ca2388ad21/op_plugin/utils/op_api_common.cpp#L861))."""

NEEDED = """
    Add AddRmsNorm Addmm Adds Amax Amin ApplyTopKTopP Arange BitwiseAndTensor BitwiseNot BitwiseOrTensor Cat Clamp
    ConstantPadNd Cumsum Div DivMods Embedding EqScalar EqTensor Exp FusedInferAttentionScoreV3 Gather GeScalar
    GeTensor GtScalar GtTensor Index IndexSelect InplaceCopy InplaceFillScalar InplaceMaskedFillScalar InplaceSub
    LogSoftmax LogicalNot LtScalar LtTensor Matmul Mul Muls NanToNum NeScalar ReduceSum RmsNorm Rsubs SWhere
    ScatterPaKvCache Sort Sub Subs SwiGlu
    """
"""Functions that the kernels call with each version of torch_npu, without "aclnn": all but those of int8, and of
npu_mrope, for which torch_npu takes either of two."""


NEEDED_BY_EXPERTS = "AddRmsNormCast GroupedMatmulV5 MoeFinalizeRoutingV2 MoeGatingTopKSoftmaxV2 MoeInitRoutingV3"
"""Functions that mixtures of experts call besides, without "aclnn": all but those of int8."""

RUNTIME = "libascendcl.so"


def runtime() -> ctypes.CDLL:
    """Return CANN's runtime library. Raises OSError if it cannot be loaded."""
    return ctypes.CDLL(RUNTIME)


def addresses(names: Iterable[str]) -> dict[str, int | None]:
    """Return the address of each function, found as torch_npu finds it; None for one that CANN lacks.

    Raises LookupError if torch_npu's look-up is not found.
    """
    try:
        find = getattr(ctypes.CDLL("libtorch_npu.so"), LOOKUP)  # torch_npu has loaded the library
    except (OSError, AttributeError) as error:
        raise LookupError(f"torch_npu's look-up of operators is not found: {error}") from None
    find.restype = ctypes.c_void_p
    find.argtypes = (ctypes.c_char_p,)
    return {name: find(name.encode()) for name in names}


def missing(needed: str = NEEDED) -> list[str]:
    """Return the functions of `needed` that CANN lacks; none if torch_npu's look-up is not found."""
    try:
        known = addresses(f"aclnn{name}{phase}" for name in needed.split() for phase in ("", "GetWorkspaceSize"))
    except LookupError:
        return []
    return sorted({name.removesuffix("GetWorkspaceSize") for name, address in known.items() if not address})
