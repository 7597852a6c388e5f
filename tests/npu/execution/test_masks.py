"""Masks of a step: their memory and their copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.masks import ConstrainedRow, MaskBuffers, mask_of, restrict


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100, 128])
def test_mask_of_and_restrict(vocabulary: int) -> None:
    words = -(-vocabulary // 32)
    ids = {0, vocabulary - 1, vocabulary // 2}
    mask = mask_of(ids, words)
    assert (mask.dtype, mask.shape) == (np.int32, (words,))
    assert {i for i in range(32 * words) if mask[i // 32] >> i % 32 & 1} == ids
    one = mask.copy()
    restrict(one, mask_of([vocabulary - 1], words))
    assert one.tolist() == mask_of([vocabulary - 1], words).tolist()
    restrict(one, mask_of([], words))
    assert one.tolist() == mask_of([vocabulary - 1], words).tolist()


def test_mask_buffers_copy_constrained_rows_only() -> None:
    allocated: list[int] = []

    class Counting(CpuBackend):
        def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            allocated.append(shape[0])
            return super().host_buffer(*shape, dtype=dtype)

    buffers = MaskBuffers(20, 100, Counting())
    assert buffers.fill([ConstrainedRow(0, 5, 9)], {}, lambda *_: None) is None
    assert allocated == []
    seen = []
    rows = [ConstrainedRow(3, 5, 9), ConstrainedRow(1, 6, 4), ConstrainedRow(19, 7, 1)]
    masks = {5: np.full(4, -1, np.int32), 7: np.array([0, 7, 0, 0], np.int32)}
    for turn in range(3):
        staged = buffers.fill(rows, masks, lambda request, position, mask: seen.append((request, position)))
        assert staged is not None
        staged.upload()
        assert staged.source.nbytes == 4 * (32 + 2 * 4)
        bits, mask_of_row = staged.of(0, 20)
        assert bits.tolist() == [[-1, -1, -1, 15], [0, 7, 0, 0]]
        assert mask_of_row.tolist() == [0 if i == 3 else 1 if i == 19 else -1 for i in range(20)]
        assert staged.of(3, 2).mask_of_row.tolist() == [0, -1]
        assert len(seen) == 2 * (turn + 1)
    assert seen[:2] == [(5, 9), (7, 1)]
    assert allocated == [32 + 20 * 4] * 2
