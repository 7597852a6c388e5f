"""Violations of each documented constraint of the emulated operators: refused, and the refusal names the constraint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npuserve.npu import emulator
from tests.npu.emulator.arguments import F32, I8, nz, on, ops, whole
from tests.npu.emulator.child import emulated
from tests.npu.emulator.violations import VIOLATIONS, attend, attend_into, both, mrope, rotary, scatter, unpaged
from tests.npu.emulator.violations_delta import chunk, recur
from tests.npu.emulator.violations_experts import (
    cast,
    choose,
    fused,
    grouped,
    grouped_int4,
    grouped_int8,
    order,
    order_directly,
    place,
    total,
)
from tests.npu.emulator.violations_int4 import of_columns
from tests.npu.emulator.violations_int4 import product as int4_product
from tests.npu.emulator.violations_int8 import by_scale, dynamic, gated, product, quant, swiglu_quant

BREAKING = ("scatter.range", "scatter.distinct", "scatternd.range", "ropecache.range", "dequantswiglu.count",
            "topktopp.p_range", "topktopp.k_range", "recurrent.lengths", "recurrent.range", "chunk.lengths",
            "initrouting.expert", "finalizerouting.place", "gmm.counts", "gmmswiglu.counts")
"""Constraints that the stream reports, which breaks it."""


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = emulator.operators()["rules"]
    return found


def violate(rule: str) -> None:
    for number, call in enumerate(VIOLATIONS[rule]):
        with pytest.raises(RuntimeError) as refused:
            call()
        assert f"[{rule}; " in str(refused.value), (
            f"violation {number} of {rule} was refused for another reason: {refused.value}"
        )


@emulated()
def test_each_violation_is_refused_by_its_rule() -> None:
    wrong = []
    for rule in VIOLATIONS:
        if rule not in BREAKING:
            try:
                violate(rule)
            except BaseException as error:
                wrong.append(f"{rule}: {error}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("rule", BREAKING)
@emulated(fresh=True)
def test_violations_by_value_are_stream_errors(rule: str) -> None:
    violate(rule)


@emulated()
def test_every_rule_has_its_violation_and_its_source() -> None:
    found = rules()
    assert sorted(rule["id"] for rule in found) == sorted(VIOLATIONS)
    for rule in found:
        assert rule["text"], rule
        assert rule["source"], rule
        assert all(name.startswith("aclnn") for name in rule["operators"]), rule


@emulated()
def test_valid_calls_are_accepted() -> None:
    """The unmodified calls of the violations are accepted."""
    attend()
    unpaged()
    attend_into(on(1, 8, 1, dtype=F32))
    quant(on(4, 64))
    dynamic(on(4, 64))
    product()
    product(w=nz(64, 32, dtype=I8))
    product(w=on(32, 64, dtype=I8).t())
    gated()
    swiglu_quant()
    int4_product()
    int4_product(weight=on(32, 8, dtype=torch.int32).t())
    int4_product(x=on(64, 5).t())
    of_columns()
    of_columns(antiquant_scale=on(1))
    by_scale()
    by_scale(zeros=on(1, dtype=I8))
    rotary(on(1, 9, 4, 128))
    both(on(1, 9, 4, 128), on(1, 9, 2, 128), on(1, 9, 1, 128))
    scatter()
    mrope()
    qkv = on(2, 512)
    mrope(query=qkv[:, :256], key=qkv[:, 256:384])
    recur()
    recur(actual_seq_lengths=whole(2), ssm_state_indices=whole(1, 1), num_accepted_tokens=None)
    chunk()
    chunk(actual_seq_lengths=whole(4, 0))
    cast()
    choose()
    order()
    order(scale=on(5, dtype=F32))
    order(quant_mode=1, active_expert_range=[2, 5])
    order_directly()
    total()
    total(rows=on(3, 5, 32), mode=3)
    place(0, -1, mode=3)
    grouped()
    grouped(weight=on(2, 32, 64).transpose(1, 2))
    grouped(group_list=whole(1, 2, dtype=torch.int64))
    grouped_int8()
    grouped_int8(weight=on(2, 64, 32, dtype=I8))
    grouped_int4()
    fused()
    ops().npu_top_k_top_p(on(2, 8), on(2) * 0, whole(1, 8))
    torch.npu.synchronize()


@emulated()
def test_missing_operator_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="aclnnAtan2 is not emulated"):
        torch.atan2(on(4, dtype=F32), on(4, dtype=F32))


@emulated(fresh=True)
def test_an_older_compiled_operator_is_refused_by_name() -> None:
    def multiply() -> None:
        torch.bmm(on(2, 5, 64), nz(2, 64, 40))
        torch.npu.synchronize()

    with pytest.raises(RuntimeError, match=r"the aclop operator BatchMatMul is not emulated"):
        multiply()
