"""Calls that violate the documented constraints of products with weights of 4 bits; see `violations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.npu.emulator.arguments import F32, FP, I8, direct, on, ops, strided

WORDS = torch.int32


def product(**changed: Any) -> Any:
    """Multiply [5, 64] by [64, 32] in groups of 32, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "x": on(5, 64), "weight": on(64, 4, dtype=WORDS), "antiquant_scale": on(2, 32), "antiquant_offset": on(2, 32),
        "bias": on(32, dtype=F32), "antiquant_group_size": 32, **changed}
    return ops().npu_weight_quant_batchmatmul(**given)


def first_phase(**changed: Any) -> None:
    """Call the first phase directly with the same arguments, since the plugin has checks of its own."""
    given: dict[str, Any] = {
        "x": on(5, 64), "weight": on(64, 4, dtype=WORDS), "scale": on(2, 32), "offset": on(2, 32), "quant_scale": None,
        "quant_offset": None, "bias": on(32, dtype=F32), "group": 32, "y": on(5, 32)}
    assert changed.keys() <= given.keys()
    direct("aclnnWeightQuantBatchMatmulV2", *(given | changed).values())


def of_columns(**changed: Any) -> Any:
    """Multiply by a weight with one scale for each column."""
    return product(**{"antiquant_scale": on(1, 32), "antiquant_offset": None, "antiquant_group_size": 0, **changed})


INT4: dict[str, list[Callable[[], Any]]] = {
    "weightquantbatchmatmul.x": [
        lambda: product(x=on(5, 64, dtype=F32), antiquant_scale=on(2, 32, dtype=F32)),
        lambda: product(x=strided(5, 64)), lambda: first_phase(x=on(1, 5, 64)),
    ],
    "weightquantbatchmatmul.weight": [
        lambda: of_columns(weight=on(64, 32, dtype=I8)), lambda: product(weight=strided(64, 4, dtype=WORDS)),
        lambda: first_phase(weight=on(1, 64, 4, dtype=WORDS)),
    ],
    "weightquantbatchmatmul.empty": [
        lambda: product(x=on(0, 64)), lambda: first_phase(weight=on(64, 0, dtype=WORDS)),
    ],
    "weightquantbatchmatmul.inner": [
        lambda: first_phase(weight=on(32, 4, dtype=WORDS)), lambda: first_phase(weight=on(4, 32, dtype=WORDS).t()),
    ],
    "weightquantbatchmatmul.size": [
        lambda: of_columns(weight=on(64, 8192, dtype=WORDS), antiquant_scale=on(1), bias=None),
        lambda: product(x=on(5, 65536), weight=on(65536, 4, dtype=WORDS), antiquant_scale=on(2048, 32),
                        antiquant_offset=None),
        lambda: product(x=on(64, 65536).t()),
    ],
    "weightquantbatchmatmul.group_size": [
        lambda: first_phase(group=48), lambda: first_phase(group=16), lambda: first_phase(group=64),
    ],
    "weightquantbatchmatmul.scale": [
        lambda: product(antiquant_scale=on(1, 32)), lambda: product(antiquant_scale=on(2, 32, dtype=FP)),
        lambda: of_columns(antiquant_scale=on(16)), lambda: of_columns(antiquant_scale=on(2, 32)),
    ],
    "weightquantbatchmatmul.offset": [
        lambda: product(antiquant_offset=on(1, 32)), lambda: product(antiquant_offset=on(2, 32, dtype=FP)),
    ],
    "weightquantbatchmatmul.bias": [
        lambda: product(bias=on(32)), lambda: product(bias=on(16, dtype=F32)),
        lambda: product(bias=on(2, 32, dtype=F32)),
        lambda: product(x=on(5, 64, dtype=FP), antiquant_scale=on(2, 32, dtype=FP), antiquant_offset=None),
    ],
    "weightquantbatchmatmul.quantized": [
        lambda: first_phase(quant_scale=on(32, dtype=torch.int64)), lambda: first_phase(quant_offset=on(32, dtype=F32)),
    ],
    "weightquantbatchmatmul.y": [
        lambda: first_phase(y=on(5, 16)), lambda: first_phase(y=on(5, 32, dtype=FP)),
    ],
}
