"""Smoke calls of the operators of linear attention, which not every CANN has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.ascend_delta import DeltaOperators

log = logging.getLogger(__name__)

TOKENS = 64
"""Tokens of the smoke call with a chunk."""


def working_operators(dtype: torch.dtype, device: torch.device) -> DeltaOperators:
    """Call both operators with activations and states of `dtype`; return those that do not fail."""
    heads, dim = 1, 128

    def chunk() -> Any:
        one = torch.ones(TOKENS, heads, dim, dtype=dtype, device=device)
        beta = one[:, :, 0].contiguous()
        state = one.new_zeros(1, heads, dim, dim)
        lengths = torch.full((1,), TOKENS, dtype=torch.int32, device=device)
        return torch_npu.npu_chunk_gated_delta_rule(
            one, one, one, beta=beta, initial_state=state, actual_seq_lengths=lengths, scale=1.0, g=-beta.float())

    def recur() -> Any:
        one = torch.ones(1, heads, dim, dtype=dtype, device=device)
        beta = one[:, :, 0].contiguous()
        state = one.new_zeros(1, heads, dim, dim)
        each = torch.ones(1, dtype=torch.int32, device=device)
        return torch_npu.npu_recurrent_gated_delta_rule(
            one, one, one, state, beta=beta, scale=1.0, actual_seq_lengths=each, ssm_state_indices=each - 1,
            num_accepted_tokens=each, g=-beta.float())

    return DeltaOperators(dtype, _works(recur, "npu_recurrent_gated_delta_rule"),
                          _works(chunk, "npu_chunk_gated_delta_rule"))


def _works(call: Callable[[], Any], name: str) -> bool:
    try:
        call()
        torch.npu.synchronize()
    except (RuntimeError, AttributeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        log.warning("%s is not used, and linear attention is slower: %s", name, first)
        return False
    return True
