"""Elementary operators of the emulated NPU, called through torch_npu, against torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulator.child import emulated

F = torch.nn.functional
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def words(text: str) -> list[str]:
    return text.split()


def _numbers() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 8, generator=made), torch.randn(4, 8, generator=made)
    return {
        "x": x,
        "y": y,
        "positive": x.abs() + 0.5,
        "h": x.bfloat16(),
        "half": y.half(),
        "i": torch.randint(0, 4, (5,), generator=made),
        "columns": torch.randint(0, 8, (4, 8), generator=made),
        "order": torch.arange(8).flip(0).expand(4, 8).contiguous(),
        "rows": torch.tensor([0, 2]),
        "batch": torch.randn(2, 3, 4, generator=made),
        "other": torch.randn(2, 4, 5, generator=made),
        "sum": torch.randn(2, 3, 5, generator=made),
        "eight": torch.randn(8, generator=made),
        "four": torch.randn(4, generator=made),
    }


def _set(place: Any, value: Any) -> Callable[[Tensor], Tensor]:
    def change(a: Tensor) -> Tensor:
        a = a.clone()
        a[place(a) if callable(place) else place] = value
        return a

    return change


def _one_input() -> dict[str, Case]:
    names = (
        "exp exp2 expm1 log log1p log2 neg sqrt rsqrt reciprocal sin cos tanh sigmoid relu floor ceil round trunc erf "
        "abs sign isfinite isnan isinf isposinf isneginf logical_not square"
    )
    n = _numbers()
    made: dict[str, Case] = {}
    for name in words(names):
        made[name] = (getattr(torch, name), (n["positive"],))
        made[f"{name}, bfloat16"] = (getattr(torch, name), (n["positive"].bfloat16(),))
    in_place = (
        "exp exp2 expm1 log log1p log2 neg sqrt rsqrt reciprocal sin cos tanh sigmoid relu floor ceil round trunc erf"
    )
    for name in words(in_place):
        made[f"{name}_"] = (lambda a, name=name: getattr(a.clone(), name + "_")(), (n["positive"],))
    made["silu"] = (F.silu, (n["x"],))
    made["silu, bfloat16"] = (F.silu, (n["h"],))
    made["bitwise_not"] = (torch.bitwise_not, (n["i"],))
    made["not"] = (lambda a: ~(a > 0), (n["x"],))
    made["logical_not_"] = (lambda a: a.clone().logical_not_(), (n["x"],))
    return made


def _two_inputs() -> dict[str, Case]:
    n = _numbers()
    made: dict[str, Case] = {}
    for name in words(
        "add sub mul div maximum minimum eq ne lt le gt ge pow fmod remainder floor_divide logical_and logical_or "
        "logical_xor"
    ):
        made[name] = (getattr(torch, name), (n["positive"], n["y"].abs() + 0.5))
    for name in words("add sub mul div eq ne lt le gt ge pow fmod remainder floor_divide"):
        made[f"{name}, number"] = (lambda a, name=name: getattr(torch, name)(a, 2.5), (n["positive"],))
        made[f"{name}, bfloat16 and number"] = (lambda a, name=name: getattr(torch, name)(a, 2.5), (n["h"].abs(),))
    for name in words("add sub mul div eq ne lt le gt ge pow remainder floor_divide"):
        made[f"{name}_"] = (
            lambda a, b, name=name: getattr(a.clone(), name + "_")(b), (n["positive"], n["y"].abs() + 0.5))
        made[f"{name}_, number"] = (lambda a, name=name: getattr(a.clone(), name + "_")(2.5), (n["positive"],))
    for name in words("bitwise_and bitwise_or bitwise_xor"):
        made[name] = (getattr(torch, name), (n["i"], n["i"].flip(0)))
        made[f"{name}, number"] = (lambda a, name=name: getattr(torch, name)(a, 3), (n["i"],))
        made[f"{name}_"] = (lambda a, b, name=name: getattr(a.clone(), name + "_")(b), (n["i"], n["i"].flip(0)))
        made[f"{name}_, number"] = (lambda a, name=name: getattr(a.clone(), name + "_")(3), (n["i"],))
    made |= {
        "broadcast": (torch.add, (n["x"], n["eight"])),
        "two dtypes": (torch.add, (n["x"], n["h"])),
        "alpha": (lambda a, b: torch.add(a, b, alpha=3), (n["x"], n["y"])),
        "number minus": (lambda a: 2 - a, (n["x"],)),
        "number over": (lambda a: 2 / a, (n["x"],)),
        "number to the power": (lambda a: 2**a, (n["x"],)),
        "number modulo": (lambda a: torch.remainder(7, a), (n["i"] + 1,)),
        "logical_and_": (lambda a, b: (a > 0).logical_and_(b > 0), (n["x"], n["y"])),
        "logical_or_": (lambda a, b: (a > 0).logical_or_(b > 0), (n["x"], n["y"])),
        "whole division": (lambda a: a // 2, (n["i"],)),
        "modulo": (lambda a: a % 3, (n["i"],)),
        "div trunc": (lambda a: torch.div(a - 2, 3, rounding_mode="trunc"), (n["i"],)),
        "div floor": (lambda a, b: torch.div(a, b, rounding_mode="floor"), (n["x"], n["positive"])),
        "div_ trunc": (lambda a: a.clone().div_(0.3, rounding_mode="trunc"), (n["x"],)),
        "div_ floor": (lambda a, b: a.clone().div_(b, rounding_mode="floor"), (n["x"], n["positive"])),
        "clamp": (lambda a: a.clamp(-0.5, 0.5), (n["x"],)),
        "clamp, one bound": (lambda a: a.clamp(max=0.25), (n["h"],)),
        "clamp, tensors": (lambda a, b: torch.clamp(a, b - 1, b + 1), (n["x"], n["y"])),
        "rsub": (torch.rsub, (n["x"], n["y"])),
        "clamp_max": (lambda a: a.clamp_max(0.1), (n["x"],)),
        "clamp_min, tensor": (torch.clamp_min, (n["x"], n["y"])),
        "clamp_max, tensor": (torch.clamp_max, (n["x"], n["y"])),
        "clamp_min": (lambda a: a.clamp_min(0.1), (n["x"],)),
        "clamp_min_": (lambda a: a.clone().clamp_min_(0.1), (n["x"],)),
        "clamp_max_": (lambda a: a.clone().clamp_max_(0.1), (n["x"],)),
        "clamp, lower tensor": (lambda a, b: torch.clamp(a, min=b), (n["x"], n["y"])),
        "clamp, upper tensor": (lambda a, b: torch.clamp(a, max=b), (n["x"], n["y"])),
        "clamp_, lower tensor": (lambda a, b: a.clone().clamp_(min=b), (n["x"], n["y"])),
        "clamp_, upper tensor": (lambda a, b: a.clone().clamp_(max=b), (n["x"], n["y"])),
        "nan_to_num": (lambda a: torch.nan_to_num(a / 0 * 0, nan=1.5), (n["x"],)),
        "where": (lambda a, b: torch.where(a > 0, a, b), (n["x"], n["y"])),
        "where, number": (lambda a: torch.where(a > 0, a, 0.0), (n["x"],)),
        "masked_fill": (lambda a: a.masked_fill(a > 0, float("-inf")), (n["h"],)),
        "masked_fill, tensor": (lambda a: a.masked_fill(a > 0, a[0, 0]), (n["x"],)),
        "equal": (lambda a, b: torch.tensor([torch.equal(a, b), torch.equal(a, a)]), (n["x"], n["y"])),
        "isclose": (torch.isclose, (n["x"], n["x"] + 1e-9)),
    }
    return made


def _rearranged() -> dict[str, Case]:
    n = _numbers()
    return {
        "to bfloat16": (lambda a: a.bfloat16(), (n["x"],)),
        "to int32": (lambda a: (a * 10).int(), (n["x"],)),
        "to bool": (lambda a: a.bool(), (n["i"],)),
        "to int64": (lambda a: a.long(), (n["x"],)),
        "contiguous": (lambda a: a.t().contiguous(), (n["x"],)),
        "strided": (lambda a: a[1:3, ::2].contiguous(), (n["x"],)),
        "expand": (lambda a: a.expand(3, 4, 8).contiguous(), (n["x"],)),
        "copy_, cast": (lambda a, b: a.clone().copy_(b), (n["x"], n["h"])),
        "set rows to a number": (_set(slice(1, 3), 0.5), (n["x"],)),
        "zero_": (lambda a: a.clone().zero_(), (n["x"],)),
        "fill_": (lambda a: a.clone().fill_(3), (n["h"],)),
        "fill_, tensor": (lambda a, b: a.clone().fill_(b[0]), (n["x"], n["eight"])),
        "cat": (lambda a, b: torch.cat([a, b], 1), (n["x"], n["y"])),
        "stack": (lambda a, b: torch.stack([a, b], 1), (n["x"], n["y"])),
        "repeat": (lambda a: a.repeat(2, 3), (n["x"],)),
        "repeat_interleave": (lambda a: a.repeat_interleave(2), (n["x"],)),
        "repeat_interleave, dim": (lambda a: a.repeat_interleave(2, 0), (n["x"],)),
        "repeat_interleave, counts": (lambda a, c: a.repeat_interleave(c, 0), (n["x"], torch.tensor([1, 2, 0, 3]))),
        "repeat_interleave, flat counts": (
            lambda a, c: a.repeat_interleave(c),
            (n["four"], torch.tensor([1, 2, 0, 3])),
        ),
        "tril": (torch.tril, (n["x"],)),
        "triu": (lambda a: a.triu(1), (n["x"],)),
        "flip": (lambda a: a.flip(0), (n["x"],)),
        "roll": (lambda a: a.roll(1, 0), (n["x"],)),
        "pad": (lambda a: F.pad(a, (1, 2), value=4.0), (n["x"],)),
        "split": (lambda a: a.split([3, 5], 1), (n["x"],)),
        "chunk": (lambda a: a.chunk(2, -1), (n["x"],)),
        "arange": (lambda a: torch.arange(2, 9, 3, device=a.device), (n["x"],)),
        "arange, floats": (lambda a: torch.arange(0, 1, 0.25, device=a.device), (n["x"],)),
        "arange, int32": (lambda a: torch.arange(5, dtype=torch.int32, device=a.device), (n["x"],)),
        "linspace": (lambda a: torch.linspace(0, 1, 5, device=a.device), (n["x"],)),
        "eye": (lambda a: torch.eye(3, device=a.device), (n["x"],)),
        "zeros": (lambda a: torch.zeros(3, 4, device=a.device), (n["x"],)),
        "ones": (lambda a: torch.ones(3, dtype=torch.bfloat16, device=a.device), (n["x"],)),
        "full": (lambda a: torch.full((3,), 2.5, device=a.device), (n["x"],)),
        "full_like": (lambda a: torch.full_like(a, 7), (n["x"],)),
    }


def _indexed() -> dict[str, Case]:
    n = _numbers()
    return {
        "embedding": (F.embedding, (n["i"], n["x"])),
        "embedding, int32": (F.embedding, (n["i"].int(), n["h"])),
        "index_select": (lambda a, i: a.index_select(0, i), (n["x"], n["i"])),
        "index_select, int32": (lambda a, i: a.index_select(1, i), (n["x"], n["i"].int())),
        "gather": (lambda a, i: a.gather(1, i[:, :3]), (n["x"], n["columns"])),
        "take": (lambda a, i: a.take(i), (n["x"], n["i"])),
        "rows": (lambda a, i: a[i], (n["x"], n["i"])),
        "columns": (lambda a, i: a[:, i], (n["x"], n["i"])),
        "pairs": (lambda a, i: a[i, i + 1], (n["x"], n["i"])),
        "an empty index": (lambda a, i: a[i[:0]], (n["x"], n["i"])),
        "where it holds": (lambda a: a[a > 0], (n["x"],)),
        "nonzero": (lambda a: (a > 0).nonzero(), (n["x"],)),
        "masked_select": (lambda a: a.masked_select(a > 0), (n["x"],)),
        "index_put_": (lambda a, i, v: a.clone().index_put_((i,), v[:2]), (n["x"], n["rows"], n["y"])),
        "index_put_, accumulated": (
            lambda a, i, v: a.clone().index_put_((i * 0,), v[:2], accumulate=True),
            (n["x"], n["rows"], n["y"]),
        ),
        "set rows": (_set([0, 2], 1.0), (n["x"],)),
        "set where it holds": (_set(lambda a: a > 0, 1.0), (n["x"],)),
        "scatter": (lambda a, i, v: a.scatter(1, i, v), (n["x"], n["order"], n["y"])),
        "scatter, number": (lambda a, i: a.scatter(1, i[:, :3], 2.0), (n["x"], n["order"])),
        "scatter, add": (lambda a, i, v: a.scatter(1, i, v, reduce="add"), (n["x"], n["columns"], n["y"])),
        "scatter_": (lambda a, i, v: a.clone().scatter_(1, i, v), (n["x"], n["order"], n["y"])),
        "scatter_, number": (lambda a, i: a.clone().scatter_(1, i, 2.0), (n["x"], n["columns"])),
        "scatter_add_": (lambda a, i, v: a.clone().scatter_add_(1, i, v), (n["x"], n["columns"], n["y"])),
        "index_add": (lambda a, i, v: a.index_add(0, i, v[:2], alpha=2), (n["x"], n["rows"], n["y"])),
        "index_add_": (lambda a, i, v: a.clone().index_add_(0, i, v[:2]), (n["x"], n["rows"], n["y"])),
        "index_copy": (lambda a, i, v: a.index_copy(0, i, v[:2]), (n["x"], n["rows"], n["y"])),
        "index_copy_": (lambda a, i, v: a.clone().index_copy_(0, i, v[:2]), (n["x"], n["rows"], n["y"])),
        "index_fill_": (lambda a, i: a.clone().index_fill_(0, i, 3.0), (n["x"], n["rows"])),
        "searchsorted": (torch.searchsorted, (n["x"].sort(-1)[0], n["y"])),
        "searchsorted, number": (lambda a: torch.searchsorted(a, 0.1, right=True), (n["eight"].sort()[0],)),
    }


@emulated()
def test_argmax_of_equal_numbers_is_the_last() -> None:
    """aclnnArgMax promises the same one in each call, and not the first as torch."""
    equal = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]]).to("npu")
    assert equal.argmax(-1).tolist() == [2, 3]
    assert equal.argmax(0, keepdim=True).tolist() == [[1, 1, 1, 1]]


def _reduced() -> dict[str, Case]:
    n = _numbers()
    made: dict[str, Case] = {}
    for name in words("sum mean amax amin logsumexp"):
        made[name] = (lambda a, name=name: getattr(torch, name)(a, -1), (n["x"],))
        made[f"{name}, kept"] = (lambda a, name=name: getattr(torch, name)(a, 0, keepdim=True), (n["x"],))
    for name in words("argmax argmin max min sum mean prod"):
        made[f"{name} of all"] = (getattr(torch, name), (n["x"],))
    made |= {
        "argmax": (lambda a: a.argmax(-1), (n["x"],)),
        "argmin": (lambda a: a.argmin(0, keepdim=True), (n["x"],)),
        "max": (lambda a: a.max(-1), (n["x"],)),
        "min": (lambda a: a.min(0, keepdim=True), (n["x"],)),
        "sum of bools": (lambda a: (a > 0).sum(-1), (n["x"],)),
        "mean, float32 of bfloat16": (lambda a: a.mean(-1, dtype=torch.float32), (n["h"],)),
        "all": (lambda a: (a > 0).all(-1), (n["x"],)),
        "any of all": (lambda a: (a > 0).any(), (n["x"],)),
        "cumsum": (lambda a: a.cumsum(-1), (n["x"],)),
        "cumsum, int": (lambda a: a.cumsum(0), (n["i"],)),
        "cummax": (lambda a: a.cummax(-1), (n["x"],)),
        "topk": (lambda a: a.topk(3), (n["x"],)),
        "sort": (lambda a: a.sort(-1, descending=True), (n["x"],)),
        "argsort, stable": (lambda a: a.argsort(dim=-1, stable=True), (n["columns"],)),
        "bincount": (torch.bincount, (n["i"],)),
        "softmax": (lambda a: a.softmax(-1), (n["x"],)),
        "softmax, bfloat16": (lambda a: a.softmax(-1), (n["h"],)),
        "softmax, float32 of bfloat16": (lambda a: a.softmax(-1, dtype=torch.float32), (n["h"],)),
        "log_softmax": (lambda a: a.log_softmax(-1), (n["x"],)),
    }
    return made


def _products() -> dict[str, Case]:
    n = _numbers()
    x, y, h = n["x"], n["y"], n["h"]
    return {
        "mm": (torch.mm, (x, y.t())),
        "mm, bfloat16": (torch.mm, (h, y.bfloat16().t())),
        "mv": (torch.mv, (x, n["eight"])),
        "dot": (torch.dot, (n["eight"], x[0])),
        "matmul, batched": (torch.matmul, (n["batch"], n["other"])),
        "bmm": (torch.bmm, (n["batch"], n["other"])),
        "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (n["four"], x, y.t())),
        "baddbmm": (torch.baddbmm, (n["sum"], n["batch"], n["other"])),
        "linear": (F.linear, (x, y)),
        "linear, bias": (F.linear, (h, y.bfloat16(), n["four"].bfloat16())),
        "linear, 3 dimensions": (F.linear, (x.view(2, 2, 8), y)),
        "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (x, y)),
    }


FAMILIES: dict[str, Callable[[], dict[str, Case]]] = {
    "one input": _one_input,
    "two inputs": _two_inputs,
    "rearranged": _rearranged,
    "indexed": _indexed,
    "reduced": _reduced,
    "products": _products,
}


def _tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, Sequence) and not isinstance(result, Tensor) else [result]


@pytest.mark.parametrize("family", FAMILIES)
@emulated()
def test_operators_equal_cpu(family: str) -> None:
    for name, (function, arguments) in FAMILIES[family]().items():
        given = [a.npu() if isinstance(a, Tensor) else a for a in arguments]
        for want, got in zip(_tensors(function(*arguments)), _tensors(function(*given)), strict=True):
            assert got.dtype == want.dtype, name
            exact = not want.is_floating_point()
            # bfloat16: a float32 that differs in its last bit may round to a neighbour
            close = {torch.float32: 2e-6, torch.bfloat16: 2**-7}.get(want.dtype, 0.0)
            torch.testing.assert_close(
                got.cpu(),
                want,
                rtol=0.0 if exact else close,
                atol=0.0 if exact else close,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@emulated()
def test_random_numbers_follow_distribution_and_seed() -> None:
    def drawn() -> dict[str, Tensor]:
        torch.manual_seed(7)
        on: dict[str, Any] = {"device": "npu"}
        return {
            "rand": torch.rand(4000, **on),
            "uniform_": torch.empty(4000, **on).uniform_(0, 1),
            "exponential_": torch.empty(4000, **on).exponential_(),
            "normal_": torch.empty(4000, **on).normal_(),
            "randint": torch.randint(0, 10, (4000,), **on),
            "bernoulli_": torch.empty(4000, **on).bernoulli_(0.3),
            "bernoulli": torch.full((4000,), 0.3, **on).bernoulli(),
            "multinomial": torch.multinomial(torch.tensor([0.0, 0.25, 0.75], **on), 4000, replacement=True),
            "exponential_, bfloat16": torch.empty(4000, dtype=torch.bfloat16, **on).exponential_(),
            "randperm": torch.randperm(100, **on),
        }

    first, again = drawn(), drawn()
    means = {
        "rand": 0.5,
        "uniform_": 0.5,
        "exponential_": 1.0,
        "normal_": 0.0,
        "randint": 4.5,
        "bernoulli_": 0.3,
        "bernoulli": 0.3,
        "multinomial": 1.75,
        "exponential_, bfloat16": 1.0,
        "randperm": 49.5,
    }
    for name, values in first.items():
        host = values.cpu().float()
        assert torch.equal(host, again[name].cpu().float()), name
        assert host.mean().item() == pytest.approx(means[name], abs=0.1), name
    assert not torch.equal(first["rand"].cpu(), first["uniform_"].cpu())
    assert sorted(first["randperm"].cpu().tolist()) == list(range(100))


@emulated()
def test_graph_draws_new_numbers_at_each_replay() -> None:
    uniform, normal = torch.empty(1000, device="npu"), torch.empty(1000, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        uniform.uniform_()
        normal.normal_()
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append((uniform.cpu(), normal.cpu()))
    assert drawn[0][0].mean().item() == pytest.approx(0.5, abs=0.1)
    assert drawn[0][1].std().item() == pytest.approx(1, abs=0.1)
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])
