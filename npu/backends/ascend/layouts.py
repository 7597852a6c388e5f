"""Layouts of weights and KV cache that the operators of CANN read."""

from __future__ import annotations

import torch

from npuserve.kernels import ascend, ascend_int4
from npuserve.kernels.attention import gathered_bytes
from npuserve.kernels.int4 import Grouping
from npuserve.kernels.weight import WeightForm
from npuserve.npu.backends.cache_layout import CacheLayout
from npuserve.npu.backends.weight_layout import WeightLayout


class AscendWeights(WeightLayout):
    """Weights in the formats of the cube unit, once they are written."""

    def int4_bytes(self, n: int, k: int, grouping: Grouping) -> int:
        return ascend_int4.packed_bytes(n, k, grouping)

    def int4_refusal(self, n: int, k: int, grouping: Grouping, dtype: torch.dtype, experts: int = 0) -> str:
        return ascend_int4.refusal(n, k, grouping, dtype, experts)

    def prepare(self, weight: WeightForm, *, table: bool, experts: int = 0) -> None:
        weight.prepare_for_ascend(table=table, experts=experts)


class AscendCache(CacheLayout):
    """KV cache with padded heads; in int8, the heads of a block are before its tokens."""

    def shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if dtype == torch.int8:  # heads before tokens: the scales' order, and the faster one of fused attention
            shape = (num_blocks, kv_heads, block_size, ascend.stored_head_dim(head_dim))
            return shape, shape
        return super().shapes(num_blocks, block_size, kv_heads, ascend.stored_head_dim(head_dim), dtype)

    def scale_shape(self, num_blocks: int, block_size: int, kv_heads: int) -> tuple[int, ...]:
        return num_blocks, kv_heads, block_size

    def dequantized_bytes(self, context: int, block_size: int, kv_heads: int, head_dim: int) -> int:
        return gathered_bytes(context, block_size, kv_heads * ascend.stored_head_dim(head_dim))
