"""Products of groups of rows on Ascend, each with a matrix of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels.ascend import torch_npu

MAX_FUSED_COLUMNS = 10240
"""Maximum columns of gate and up of an expert in the product that applies SwiGLU and quantizes
(aclnnGroupedMatmulSwigluQuantWeightNzV2.md, constraints on A2 and A3)."""


@dataclass(slots=True, eq=False)
class Groups:
    """Rows ordered by expert.

    tokens: [E] int64, rows of each of this rank's experts. Rows beyond their sum belong to no expert.
    """

    tokens: Tensor

    @property
    def list_type(self) -> int:
        """Type of the list: 1 for counts, which must not have the length 1, and 0 for sums from the start."""
        return int(len(self.tokens) > 1)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows x [R, K] by matrices of their experts, weight [E, K, N]: [R, N]. Other rows are undefined."""
        out: Tensor = torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=self.tokens, split_item=2, group_type=0, group_list_type=self.list_type)[0]
        return out

    def multiply_int8(
        self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Multiply int8 rows by int8 matrices, and by the scales x_scale [R] and weight_scale [E, N]."""
        out: Tensor = torch_npu.npu_grouped_matmul(
            [x], [weight], scale=[weight_scale], per_token_scale=[x_scale], group_list=self.tokens, split_item=2,
            group_type=0, group_list_type=self.list_type, output_dtype=dtype)[0]
        return out

    def multiply_int4(self, x: Tensor, words: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Multiply rows by 4 bits in words [E, K, N / 8], with scale and offset [E, N] or [E, groups, N]."""
        out: Tensor = torch_npu.npu_grouped_matmul(
            [x], [words], antiquant_scale=[scale], antiquant_offset=[offset], group_list=self.tokens, split_item=2,
            group_type=0, group_list_type=self.list_type)[0]
        return out
