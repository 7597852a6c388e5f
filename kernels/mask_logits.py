"""Bit masks of the ids that rows may take."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def random_masks(generator: torch.Generator, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return masks for a test: bits and mask_of_row of `mask_logits`. The first mask allows one id; some rows have
    none."""
    words = -(-vocabulary // 32)
    count = max(1, rows // 2 + 1)
    bits = torch.randint(-2**31, 2**31, (count, words), generator=generator)
    one = int(torch.randint(vocabulary, (), generator=generator))
    bits[0] = 0
    bits[0, one // 32] = 1 << one % 32
    return bits.to(torch.int32), torch.randint(-1, count, (rows,), generator=generator, dtype=torch.int32)


def _case(rows: int, vocabulary: int, padding: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, int, Tensor, Tensor]:
        logits = torch.randn(rows, vocabulary + padding, generator=generator).mul(3).to(dtype)
        return logits, vocabulary, *random_masks(generator, rows, vocabulary)

    return Case(f"{rows}x{vocabulary}+{padding}", make, benchmark)


@kernel(
    "mask_logits",
    cases=[_case(1, 7, 0), _case(5, 101, 27), _case(9, 96, 3), *(_case(r, 151936, 0, True) for r in (1, 8, 32))])
def mask_logits(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> None:
    """Set the masked logits of the first `vocabulary` ids to minus infinity in place; logits [R, Vp].

    bits: [M, ceil(vocabulary / 32)] int32, the masks. Bit i of word j allows id 32 j + i.
    mask_of_row: [R] int32, the mask of each row; -1 for none.
    """
    banned = _unpacked(bits, vocabulary)[mask_of_row.clamp(min=0)].logical_not() & (mask_of_row >= 0).unsqueeze(1)
    logits[:, :vocabulary].masked_fill_(banned, -torch.inf)


def _unpacked(bits: Tensor, vocabulary: int) -> Tensor:
    """Return masks as [M, vocabulary] bool."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits.unsqueeze(2) >> places & 1).flatten(1)[:, :vocabulary] != 0


@native.implementation(mask_logits)
def _(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> None:
    native.call(
        "mask_logits",
        ("mask_logits", logits.dtype, [logits, bits, mask_of_row], [*logits.shape, vocabulary, bits.shape[1]]))


@ascend.implementation(mask_logits)
def _(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> None:
    """Unpack by `bitwise_and`, which the device has for int32. The numbers of a mask are unpacked once for all rows."""
    allowed = (bits.unsqueeze(2) & _powers(bits.device)).flatten(1)[:, :vocabulary] != 0
    banned = allowed.logical_not().index_select(0, mask_of_row.clamp(min=0)) & (mask_of_row >= 0).unsqueeze(1)
    logits[:, :vocabulary].masked_fill_(banned, -torch.inf)


@cache
def _powers(device: torch.device) -> Tensor:
    """Return [32] int32 with one bit each."""
    return torch.tensor([1 << i for i in range(31)] + [-2**31], dtype=torch.int32).to(device)


@triton.implementation(mask_logits)
def _(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> None:
    from npuserve.kernels.triton import launch_vocabulary

    launch_vocabulary.mask_logits(logits, vocabulary, bits, mask_of_row)
