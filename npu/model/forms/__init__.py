"""Forms in which the matrices of a model are stored, one file each.

`matrix.py` is what a form declares: its bytes, its weight, and the tensors of the checkpoint that fill it. The scheme
of a checkpoint decides the form (`FORMS`). Weights and products of a form are in `kernels` (kernels/weight.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npuserve.npu.model.forms import modelslim, w4a8, w4a16, w8a8
from npuserve.npu.model.forms.matrix import StoredForm
from npuserve.npu.quantization.modelslim import ModelSlimW4A8, ModelSlimW8A8
from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.w4a8 import W4A8
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantization.w8a8 import W8A8

FORMS: dict[type[WeightScheme], Callable[[Any], StoredForm]] = {
    ModelSlimW8A8: modelslim.ModelSlimInt8, ModelSlimW4A8: modelslim.ModelSlimInt4, W4A16: w4a16.StoredInt4,
    W4A8: w4a8.StoredInt4Int8, W8A8: w8a8.form_of_scheme}
"""Scheme of a checkpoint -> the form that stores it."""


def form_of_scheme(scheme: WeightScheme) -> StoredForm:
    """Return the form in which a quantized matrix is stored."""
    return FORMS[type(scheme)](scheme)
