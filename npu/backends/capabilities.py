"""Capabilities and limits of a device: the values that do not change while a backend is in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npuserve.kernels.sample import Filters


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device computes, and the limits of its kernels. A backend's class declares them.

    Numbers:

    dtypes: dtypes of weights and activations that "auto" keeps from a checkpoint; the first one replaces any other.
    explicit_dtypes: further dtypes, which are used only if they are requested by name.
    deterministic: a row's numbers depend neither on the batch nor on chunking.

    Weights:

    vocabulary_tile: the LM head's rows are padded to a multiple of it.
    int8_levels: quantization levels of dynamic int8 activations (`quantized.Scheme`).
    int8_zeros: the kernels support int8 zero points.
    float8: the kernels support float8 weights and activations.
    int4: the kernels support weights of 4 bits.
    int4_rows: rows of such a weight are a multiple of it.
    w4a8: the kernels multiply weights of 4 bits by int8 activations.
    experts: the kernels support mixtures of experts.
    ragged_experts: groups of 4 bits may not divide the columns of an expert.
    widens_routers: the router multiplies by a copy of its weight in float32, which is kept beside other dtypes.
    rounds_draft_head: an LM head in int8 beside one of floats makes the drafts of an MTP head faster.
    stacks: the kernels read columns of a wider matrix, so that products of one input are stored as one, where layer and
        forms allow it. Saves launches.
    counts_together: the counters of all layers are added to once a step (`StateStore.count`), not by kernels of each.

    State of requests:

    block_size: default number of tokens per KV-cache block.
    block_multiple: a block size must be a multiple of it.
    max_block_size: largest number of tokens per KV-cache block.
    padding_blocks: extra KV-cache blocks that no request gets, for the padding of captured steps; 0 if they need no
        padding.
    cache_dtypes: dtypes of a quantized KV cache that the kernels support.
    scale_dtype: dtype of the scales of a quantized KV cache.
    offloads: blocks can be copied to and from host memory beside the steps (`Backend.side_copies`).
    fixed_state: the kernels support layers with a fixed state, such as linear attention.
    state_dtypes: dtypes of the states of linear attention that the kernels support, first the one for which they are
        made. "auto" is that one beside activations of the same dtype, and float32 beside others.

    Steps:

    host_lengths: attention reads lengths from the host. A step captured for any batch then has one row more than a
        batch can have. The last row takes the padding tokens.
    compiles: kernels are compiled at the first call with a new kind of arguments, which takes seconds.
    sampler_filters: filters of the captured steps that contain the kernels `penalize` and `sample`, which then copy
        nothing to the host. Ascending, up to ANY; () if a captured step cannot contain them.
    sampling_bytes: bytes per logit that the `sample` kernel allocates.
    measures_memory: the KV cache takes what `DeviceMemory.excess_bytes` of a warm-up step leaves; False: what a
        prediction leaves.

    Ranks:

    collectives: backend of torch.distributed that communicates the device's tensors between ranks; "" for one rank.
    reduces: it also adds the ranks' tensors, in place. False: the kernels gather and add them.
    shares_memory: the ranks of one machine use the same memory and cores, and can share a region for collectives.
    """

    dtypes: tuple[str, ...]
    explicit_dtypes: tuple[str, ...] = ()
    deterministic: bool = False

    vocabulary_tile: int
    int8_levels: float = 127.5
    int8_zeros: bool = False
    float8: bool = False
    int4: bool = False
    int4_rows: int = 1
    w4a8: bool = False
    experts: bool = False
    ragged_experts: bool = True
    widens_routers: bool = False
    rounds_draft_head: bool = False
    stacks: bool = False
    counts_together: bool = False

    block_size: int
    block_multiple: int = 1
    max_block_size: int = 1024
    padding_blocks: int = 0
    cache_dtypes: tuple[torch.dtype, ...] = ()
    scale_dtype: torch.dtype = torch.bfloat16
    offloads: bool = False
    fixed_state: bool = False
    state_dtypes: tuple[str, ...] = ("float32",)

    host_lengths: bool = False
    compiles: bool = False
    sampler_filters: tuple[Filters, ...] = ()
    sampling_bytes: int = 0
    measures_memory: bool = False

    collectives: str = ""
    reduces: bool = False
    shares_memory: bool = False
