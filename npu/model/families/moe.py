"""Values of config.json that describe mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.npu.model.families.config_json import ModelError, flag, whole
from npuserve.npu.model.families.family import num_layers
from npuserve.npu.model.layers.experts import PANEL, Experts
from npuserve.npu.model.layers.layer import Layer
from npuserve.npu.model.layers.swiglu import SwiGLU

MAX_EXPERTS = 4096


def read_experts(
    data: Mapping[str, Any], count: int, top_k: int, width: int, *, renormalizes: bool | None, shared: int = 0
) -> Experts:
    """Return the layer of experts. The numbers are defaults of absent keys.

    renormalizes: default of norm_topk_prob; None if the family has no such key and always renormalizes.
    shared: default of the shared expert's size; 0 if the family has none.
    """
    given = data if data.get("num_experts") is not None else {"num_experts": data.get("num_local_experts", count)}
    count = whole(given, "num_experts")
    if count > MAX_EXPERTS:
        raise ModelError(f"config.json: num_experts: must be in [1, {MAX_EXPERTS}], got {count}")
    top_k = whole(data, "num_experts_per_tok", top_k)
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok: {top_k} is more than the model's {count} experts "
                         "(num_experts)")
    hidden = whole(data, "hidden_size")
    width = whole(data, "moe_intermediate_size", width)
    for key, size in (("hidden_size", hidden), ("moe_intermediate_size", width)):
        if size % PANEL:
            raise ModelError(f"config.json: {key}: of a mixture of experts must be a multiple of {PANEL}, got {size}")
    return Experts(
        count, top_k, hidden, width,
        renormalize=True if renormalizes is None else flag(data, "norm_topk_prob", renormalizes),
        shared_width=whole(data, "shared_expert_intermediate_size", shared) if shared else 0)


def read_mlps(data: Mapping[str, Any], experts: Experts) -> list[Layer]:
    """Return the MLP of each layer: experts, or one MLP by mlp_only_layers and decoder_sparse_step."""
    count = num_layers(data)
    dense = data.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(index, int) and 0 <= index < count for index in dense):
        raise ModelError(f"config.json: mlp_only_layers: must be a list of layers in [0, {count - 1}], got {dense!r}")
    step = whole(data, "decoder_sparse_step", 1)
    is_sparse = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    mlp = experts if all(is_sparse) else SwiGLU(whole(data, "intermediate_size"))
    return [experts if sparse else mlp for sparse in is_sparse]
