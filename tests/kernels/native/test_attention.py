"""Native attention: the bits of a query do not depend on the rows and threads that it is computed with."""

from __future__ import annotations

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.kernels.kv_cache import pack_keys, pack_values, quantize_heads, unpack_keys, unpack_values
from npuserve.kernels.native import layout

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
CONTEXT, BLOCKS = 600, 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 16), (16, 8, 128), (9, 3, 64), (5, 5, 10), (4, 1, 80)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_bits_are_independent_of_batch_chunks_and_threads(
    isa, dtype, int8, q_heads, kv_heads, dim, block_size
):
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    keys, values = (randn(BLOCKS, block_size, kv_heads, dim) for _ in range(2))
    q = randn(CONTEXT, q_heads, dim)
    table = torch.randperm(BLOCKS, generator=generator)[: -(-CONTEXT // block_size)].int()
    # Slots past the context may hold any number.
    last = CONTEXT % block_size
    if int8:
        keys, values = quantize_heads(keys), quantize_heads(values)
        keys.scale[table[-1], last:] = values.scale[table[-1], last:] = torch.nan
    else:
        keys[table[-1], last:] = values[table[-1], last:] = torch.nan
    packed = pack_keys(keys), pack_values(values)
    attend = paged_attention.implementations["cpu"].function

    def outputs(rows: list[tuple[int, int]]) -> torch.Tensor:
        """Return the outputs of rows (first query, end)."""
        metadata = AttentionMetadata.from_lengths(
            table.expand(len(rows), -1).contiguous(), [end for _, end in rows], [end - first for first, end in rows])
        queries = torch.cat([q[first:end] for first, end in rows])
        return attend(queries, *packed, metadata, dim**-0.5)

    whole = outputs([(0, CONTEXT)])
    assert not whole.isnan().any()
    for threads in (1, 2, 3):
        native.library().set_threads(threads)
        for rows in (
            *([(end - 1, end)] for end in (1, 2, 16, 17, 255, 256, 257, 511, 512, 513, CONTEXT)),
            *([(first, first + n)] for first, n in ((0, 7), (3, 64), (250, 9), (300, 33), (599, 1))),
            [(299, 300), (590, 600), (0, 1), (24, 64), (256, 257)],
            [(i, i + 1) for i in range(0, CONTEXT, 7)],
        ):
            expected = torch.cat([whole[first:end] for first, end in rows])
            assert torch.equal(outputs(rows), expected), (threads, rows)


def test_pack_and_unpack_are_inverses():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.randn(3, 32, 2, 10, generator=generator).to(dtype)
        keys, values = pack_keys(plain), pack_values(plain)
        assert keys.shape == layout.key_shape(3, 32, 2, 10, dtype)
        assert values.shape == layout.value_shape(3, 32, 2, 10, dtype)
        assert layout.block_size(keys) == 32
        assert torch.equal(unpack_keys(keys), plain)
        assert torch.equal(unpack_values(values, 10), plain)
