"""Operators that the emulator lacks, and those that a version of CANN lacks.

torch_npu looks operators up by name, and takes older ones where the newest is missing. Operators that CANN has and the
emulator lacks are stubs, which fail with an error that names them: with them torch_npu takes the same branches as on a
device. Operators that the emulated version of CANN lacks are not exported.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEAD = """#include "emulator.h"

#define REFUSED(NAME, OPERATOR) \\
  extern "C" EMU_API __attribute__((weak)) int NAME() { return emu::refuse(#OPERATOR " is not emulated"); }
#define ABSENT(NAME) REFUSED(NAME, NAME) REFUSED(NAME##GetWorkspaceSize, NAME)

"""


VERSIONS = ("8.5.0", "9.0.0", "9.1.0", "9.2.0")
"""Versions of CANN that can be emulated."""

ADDED = {
    "9.0": """
        AllGatherMatmulV2 AlltoAllMatmul AlltoAllQuantMatmul AlltoAllvQuantGroupedMatMul AngleV2 BlockSparseAttention
        BlockSparseAttentionGrad Cdist CdistBackward ChunkCat ConfusionTranspose DenseLightningIndexerGradKLLoss
        DenseLightningIndexerSoftmaxLse DualLevelQuantMatmulWeightNz DynamicDualLevelMxQuant DynamicMxQuantWithDualAxis
        FastLayerNorm FlashAttentionScoreGradV4 FlashAttentionScoreV4 FusedFloydAttention FusedFloydAttentionGrad
        FusedInferAttentionScoreV5 FusedQuantMatmul FusedQuantMatmulWeightNz GroupedDynamicBlockQuant
        KlDivTargetBackward LSTM LeftShift LeftShifts LightningIndexer LogSpace LstmBackward MatmulAlltoAll
        MatmulReduceScatterV2 QkvRmsNormRopeCache QuantBatchMatmulInplaceAdd QuantFlashAttentionScore
        QuantMatmulAllReduceV4 QuantMatmulAlltoAll RopeWithSinCosCacheV2 ScatterPaCache SilentCheck SilentCheckV2
        SparseFlashAttention ThnnFusedLstmCell ThnnFusedLstmCellBackward TopKTopPSampleV2 TransposeQuantBatchMatMul
        """,
    "9.1": """
        AddRmsNormDynamicMxQuant AlltoAllMatmulV2 AlltoAllQuantMatmulV2 AlltoAllvGroupedMatMulV2
        AlltoAllvQuantGroupedMatMulV2 AmpUpdateScale AntiMxQuant ApplyAdam Bucketize ChunkGatedDeltaRule
        DeformableConv2dBackward DynamicBlockMxQuant DynamicBlockQuantV2 DynamicMxQuantV2 DynamicMxQuantWithDualAxisV2
        DynamicQuantV4 FlatQuantV2 FusedCausalConv1d FusedSgd GroupedDynamicMxQuantV2 GroupedMatMulAlltoAllvV2
        InplaceFusedCausalConv1d InplaceRandomWithoutFromTo InplaceRandomWithoutFromToTensor KvRmsNormRopeCacheV2
        MaskedCausalConv1d MaskedCausalConv1dBackward MatmulAllReduceV3 MatmulAlltoAllV2 MhcPost MhcPostBackward MhcPre
        MhcPreBackward MhcSinkhorn MhcSinkhornBackward MoeDistributeCombineSetup MoeDistributeCombineTeardown
        MoeDistributeDispatchSetup MoeDistributeDispatchTeardown MoeGatingTopKBackward QuantFlashAttentionScoreGrad
        QuantGroupedMatMulAlltoAllv QuantGroupedMatMulAlltoAllvV2 QuantGroupedMatmulDequantWeightNZ
        QuantLightningIndexer QuantMatmulAllReduceV5 QuantMatmulAlltoAllV2 QuantMax RmsNormDynamicMxQuant
        RmsNormGradQuant RmsNormQuantV3 RotateQuant SwigluBackwardMxQuantWithDualAxis SwigluGroupQuant
        SwigluGroupQuantGrad SwigluMxQuant SwigluMxQuantWithDualAxis TransposeBatchMatMulWeightNz
        TransposeQuantBatchMatMulWeightNz WeightQuantMatmulAllReduceV2
        """,
    "9.2": """
        DropoutV3Grad DynamicMxQuantV3 GRU GRUBackward GroupedDynamicBlockQuantV2 GroupedQuantMax InplaceScatterReduce
        MoeFinalizeRoutingV4 ScatterReduce Sleep WeightQuantPreprocess
        """,
}
"""Version of CANN -> operators that torch_npu 2.10.0.post4 or 2.13.0 looks up and that came with it, without "aclnn".

From the branches of these versions, and 9.2.0-beta.2, of the repositories ops-nn (9f8a66e79, fcebf031d, 90ec49278,
19c431eb9), ops-math (b6031bda9, 0bcce5c19, 165d41f02, 0a2ce5b57) and ops-transformer (8fff8f927, 1a341f415, 3311e26e5;
none of 9.2). Of all functions that our kernels call, RopeWithSinCosCacheV2 alone is among them."""


def lacking(cann: str) -> list[str]:
    """Return the operators that a version of CANN lacks."""
    return [f"aclnn{name}" for version, names in ADDED.items() if f"{version}.0" > cann for name in names.split()]


def source(torch_npu: Path, without: str) -> str:
    """Return C++ weak definitions of all operators named in the package's libraries, overridden by ops/.

    without: beginning of the names of operators that another library has.
    """
    strings: set[bytes] = set()
    for library in sorted((torch_npu / "lib").glob("*.so")):
        strings |= set(re.findall(rb"(?<=\0)aclnn[A-Z]\w*(?=\0)", library.read_bytes()))
    names = sorted(name.decode() for name in strings
                   if name + b"GetWorkspaceSize" in strings and not name.startswith(without.encode()))
    return _HEAD + "".join(f"ABSENT({name})\n" for name in names)
