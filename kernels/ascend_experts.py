"""What the Ascend implementations of mixtures of experts share: the order of a step's rows by expert.

npu_moe_init_routing_v2 gathers the rows of a step, and quantizes them if they are for int8 weights. Their order is
therefore known after the router's kernel has run, when the first product does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.ascend_groups import Groups
from npuserve.kernels.quantize import ascend_fuses, ascend_quantize
from npuserve.kernels.quantized import Quantized, Scheme

MAX_EXPERTS = 1024
"""Maximum experts of a rank in a grouped product (aclnnGroupedMatmulV5.md, constraints)."""

MAX_CHOSEN = 1024
"""Maximum experts of a token (aclnnMoeGatingTopKSoftmaxV2.md)."""


@dataclass(slots=True, eq=False)
class AscendRouting:
    """Experts of the tokens of a step; see `experts.Routing`.

    weights: [T, k], float32, or float16 beside activations in it.
    chosen: [T, k] int32, the experts of each token.
    first, count: experts of this rank.
    experts: experts of all ranks.
    counters: [count] int64, to which `gather` adds the tokens of each of this rank's experts; or None.
    places, groups: [T k] int32, as in `Routing`, and the rows' groups; None until `gather`.
    """

    weights: Tensor
    chosen: Tensor
    first: int
    count: int
    experts: int
    counters: Tensor | None = None
    places: Tensor | None = None
    groups: Groups | None = None

    @property
    def tokens(self) -> Tensor:
        """Tokens of each of this rank's experts, [count] int64."""
        return self.gathered[1].tokens

    def gather(self, x: Tensor | Quantized, scheme: Scheme | None) -> Tensor | Quantized:
        """Return the rows of x [T, K] ordered by expert: [T k, K]. scheme: quantizes floats; None leaves them."""
        fuses = isinstance(x, Tensor) and ascend_fuses(scheme)
        given = x if scheme is None or fuses or isinstance(x, Quantized) else ascend_quantize(x, scheme)
        values, scale = (given.values, given.scale) if isinstance(given, Quantized) else (given, None)
        rows, self.places, tokens, row_scale = torch_npu.npu_moe_init_routing_v2(
            values, self.chosen, scale=scale, active_num=self.chosen.numel(), expert_num=self.experts,
            expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=1 if fuses else -1,
            active_expert_range=[self.first, self.first + self.count], row_idx_type=0)
        self.groups = Groups(tokens)
        if self.counters is not None:
            self.counters += tokens
        return Quantized(rows, row_scale) if fuses or isinstance(given, Quantized) else rows

    @property
    def gathered(self) -> tuple[Tensor, Groups]:
        """Return `places` and `groups`."""
        if self.places is None or self.groups is None:
            raise ValueError("routing: the rows of the step were not gathered yet")
        return self.places, self.groups

    def sum(self, results: Tensor, shared: Tensor | None) -> Tensor:
        """Sum each token's rows of results [T k, H] times their weights, and shared [T, H] or None: [T, H].

        A rank that has not all experts has undefined rows, whose places are -1. The operator takes such places if the
        rows are those of experts with a capacity: here of k experts, with T rows each.
        """
        places, _ = self.gathered
        tokens, top_k = self.chosen.shape
        is_whole = self.count == self.experts
        rows = results if is_whole else results.view(top_k, tokens, -1)
        total: Tensor = torch_npu.npu_moe_finalize_routing(
            rows, shared, None, None, self.weights, places, None, drop_pad_mode=2 if is_whole else 3)
        return total


def routing_of(weights: Tensor, places: Tensor, begins: Tensor, dtype: torch.dtype) -> AscendRouting:
    """Return a routing in which rows are gathered, for the fields of `experts.Routing`.

    Pairs of token and expert that another rank computes choose expert E of E + 1. dtype: of the activations.
    """
    count = len(begins) - 1
    flat = places.flatten()
    expert = torch.searchsorted(begins[1:].contiguous(), flat, right=True, out_int32=True)
    chosen = torch.where(flat >= 0, expert, count).view_as(places).int()
    experts = count + int(bool((places < 0).any()))
    weights = weights.to(dtype) if dtype == torch.float16 else weights.float()
    return AscendRouting(weights, chosen, 0, count, experts, None, flat.contiguous(), Groups(begins.diff().long()))
