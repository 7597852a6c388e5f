"""Numbers of 4 bits as Ascend's product of floats with such weights takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from npuserve.kernels import ascend
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.ascend_groups import Groups
from npuserve.kernels.int4 import SHIFTS, WORD_CODES, Grouping, PlainInt4, to_words

MAX_SIDE = 65535
"""Maximum rows and columns of a weight (aclnnWeightQuantBatchMatmulV2.md, constraints on A2 and A3)."""

PACKED_AT_ONCE = 1 << 24
"""Numbers packed at a time. Each takes 4 bytes then, on the device and on the host, where torch_npu packs them."""


@dataclass(slots=True, eq=False)
class AscendInt4:
    """Numbers [N, K] in the layout of `npu_weight_quant_batchmatmul`: (level + offset) * scale.

    words: [K, N / 8] int32 in ND, with the levels -8 to 7 of 8 rows in order, the first one in the lowest bits.
        FRACTAL_NZ is for compiled graphs alone (documentation of npu_weight_quant_batchmatmul).
    scale, offset: [groups, N], of the dtype of the activations. offset: None for 0.

    The matrices of E experts, of N rows each, are [E, K, N / 8] and [E, groups, N], as npu_grouped_matmul takes them.
    """

    grouping: Grouping
    words: Tensor
    scale: Tensor
    offset: Tensor | None

    @classmethod
    def pack(cls, plain: PlainInt4, dtype: torch.dtype, experts: int = 0) -> AscendInt4:
        """Return a copy of numbers on the device.

        dtype: of the activations.
        experts: number of the experts whose matrices are the rows; 0 for one matrix.
        """
        k = plain.shape[1]
        n = plain.shape[0] // max(experts, 1)
        words = torch.empty(max(experts, 1), k, n // WORD_CODES, dtype=torch.int32, device=plain.words.device)
        step = max(1, PACKED_AT_ONCE // (n * WORD_CODES))
        for matrix, rows in zip(words, plain.words.split(n), strict=True):
            for first in range(0, k // WORD_CODES, step):
                levels = _levels(rows[:, first : first + step])
                packed = torch_npu.npu_convert_weight_to_int4pack(levels.t().contiguous())
                matrix[first * WORD_CODES : first * WORD_CODES + len(packed)] = packed

        def by_group(numbers: Tensor) -> Tensor:
            of_experts = numbers.view(len(words), n, -1).transpose(1, 2).contiguous().to(dtype)
            return of_experts if experts else of_experts[0]

        offset = None if plain.zero is None else by_group(plain.zero).neg()
        return cls(plain.grouping, words if experts else words[0], by_group(plain.scale), offset)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        experts, k, words = self.words.shape if self.words.dim() == 3 else (1, *self.words.shape)
        return experts * words * WORD_CODES, k

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.words, self.scale, self.offset) if part is not None)

    def rows(self, ids: Tensor) -> PlainInt4:
        """Return copies of rows `ids` [m] int64 on the host."""
        words = _one_matrix(self.words)
        nibbles = torch.stack([words >> 4 * place & 15 for place in range(WORD_CODES)], dim=-1).flatten(1)
        scale = _one_matrix(self.scale).t()[ids].contiguous().to(self.grouping.scales)
        zero = None if self.offset is None else _one_matrix(self.offset).neg().to(torch.int8).t()[ids].contiguous()
        return PlainInt4(self.grouping, to_words((nibbles ^ 8).t()[ids]), scale, zero)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] by the numbers and add bias [N] or None: [T, N]."""
        if bias is not None and bias.dtype == torch.bfloat16:  # beside which the operator takes float32 alone
            bias = ascend.table_as(bias, torch.float32)
        size = self.grouping.size if len(self.scale) > 1 else 0  # of several groups only
        out: Tensor = torch_npu.npu_weight_quant_batchmatmul(
            x, self.words, self.scale, antiquant_offset=self.offset, bias=bias, antiquant_group_size=size)
        return out

    def grouped_product(self, x: Tensor, groups: Groups) -> Tensor:
        """Multiply rows x [R, K] by the numbers of their experts. The operator takes no absent offset."""
        offset = _zeros(self.scale.shape, x.dtype, x.device) if self.offset is None else self.offset
        scale, offset = (part.squeeze(1) if part.shape[1] == 1 else part for part in (self.scale, offset))
        return groups.multiply_int4(x, self.words, scale, offset)


@cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the offsets of all layers whose numbers have none."""
    return torch.zeros(shape, dtype=dtype).to(device)


def _one_matrix(part: Tensor) -> Tensor:
    """Return words or scales of experts as those of one matrix, on the host."""
    part = part.cpu()
    return part if part.dim() == 2 else part.transpose(0, 1).flatten(1)


def packed_bytes(n: int, k: int, grouping: Grouping) -> int:
    """Return the bytes of `AscendInt4` numbers [n, k]."""
    of_group = grouping.scales.itemsize * (1 + grouping.zeros)
    return n * (k // 2 + grouping.groups(k) * of_group)


def refusal(n: int, k: int, grouping: Grouping, dtype: torch.dtype, experts: int = 0) -> str:
    """Return why the product does not take a weight [n, k] beside activations of `dtype`; "" if it does.

    experts: number of the experts whose matrices are its rows; 0 for one matrix.
    """
    n //= max(experts, 1)
    if n % WORD_CODES:
        return f"have {n} rows, which are not a multiple of {WORD_CODES}"
    if experts and grouping.groups(k) > 1:  # aclnnGroupedMatmulV5.md, constraints on A16W4
        if grouping.zeros:
            return "of experts have zero points for groups of columns"
        if k % grouping.size:
            return f"of experts have {k} columns, which groups of {grouping.size} do not divide"
    if max(n, k) > MAX_SIDE:
        return f"have {max(n, k)} rows or columns, and the operator takes {MAX_SIDE}"
    if dtype not in (grouping.scales, torch.float32):  # float32, which an emulated device takes, has all scales
        scales, activations = (str(of).removeprefix("torch.") for of in (grouping.scales, dtype))
        return f"have scales in {scales} beside activations in {activations}"
    return ""


def _levels(words: Tensor) -> Tensor:
    """Return words [N, w] of `PlainInt4` as levels [N, 8 w] int32 of -8 to 7.

    Bytes are separated by operators that the device has for int32.
    """
    pairs = words.contiguous().view(torch.uint8).view(*words.shape, 4).int()  # bytes of two codes
    halves = pairs % 16, torch.div(pairs, 16, rounding_mode="floor")
    codes = [halves[shift % 8 // 4][..., shift // 8] for shift in SHIFTS]
    return torch.stack(codes, dim=-1).flatten(1) - 8
