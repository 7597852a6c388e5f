"""Constrained requests with the real grammar library, scheduler and runner on the CPU: equal tokens in every order of
work."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from npuserve.kernels import native
from npuserve.npu.execution.runner import Runner
from npuserve.service import metrics
from npuserve.service.scheduling.sequence import Sequence
from tests.npu.backends.small import saved
from tests.npu.execution.test_runner import load
from tests.support import constrained
from tests.support.constrained import Alone, Case
from tests.support.oracle_drafts import Kind, drafting_of

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

BLOCK = 16
CASES = constrained.cases(BLOCK)
ENOUGH, FEW = 64, 4
"""Blocks of the KV cache."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    before = native.library().threads
    folder = saved(tmp_path_factory.mktemp("model"), vocabulary=constrained.VOCABULARY)
    yield load(folder, dtype="float32", max_num_batched_tokens=48, max_drafts=24)
    native.library().set_threads(before)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> Alone:
    return constrained.expected_by(runner, ENOUGH)


def test_constrained_answers_alone_end_and_are_valid(alone: Alone) -> None:
    answers = {case: alone(case) for case in CASES}
    assert {case.kind for case, answer in answers.items() if answer.grammar_completed} == {
        *constrained.CONSTRAINTS} - {"none"}
    assert len({tuple(answer.tokens) for answer in answers.values()}) > len(CASES) - 3


@pytest.mark.parametrize("is_restored", [False, True], ids=["new", "restored"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("company", ["none", "unconstrained", "preempted"])
@pytest.mark.parametrize("sampling", constrained.SAMPLINGS)
@pytest.mark.parametrize("kind", [kind for kind in constrained.CONSTRAINTS if kind != "none"])
def test_constrained_tokens_are_those_of_a_request_alone(
    runner: Runner, alone: Alone, kind: str, sampling: str, company: str, depth: int, is_restored: bool
) -> None:
    """company: no other rows; unconstrained ones; all kinds, with blocks for a part of them."""
    (case,) = (case for case in CASES if (case.kind, case.sampling) == (kind, sampling))
    others: list[Case] = []
    if company == "unconstrained":
        others = [other for other in CASES if other.kind == "none"] * 2
    elif company == "preempted":
        others = [other for other in CASES if other != case] + [other for other in CASES if other.kind == "none"]
    chosen = [*others[:2], case, *others[2:]]
    found, scheduler = constrained.answered(
        runner, chosen, alone, depth=depth, pool=FEW if company == "preempted" else ENOUGH, seats=8, budget=48,
        is_restored=is_restored)
    assert found == [alone(each) for each in chosen]
    assert scheduler.forced_tokens or kind != "forced" or sampling == "penalized" or is_restored
    assert bool(scheduler.preemptions) == (company == "preempted") or is_restored


@pytest.mark.parametrize("is_restored", [False, True], ids=["new", "restored"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("company", ["none", "all", "preempted"])
@pytest.mark.parametrize("mask_seconds", [0.0, 0.0005])
def test_constrained_tokens_do_not_depend_on_deferred_rows(
    runner: Runner, alone: Alone, company: str, depth: int, mask_seconds: float, is_restored: bool
) -> None:
    """mask_seconds: a step waits for no mask, or for some."""
    deferred = metrics.deferred_rows_total._value.get()
    for chosen in [[case] for case in CASES] if company == "none" else [CASES]:
        found, _ = constrained.answered(
            runner, chosen, alone, depth=depth, pool=FEW if company == "preempted" else ENOUGH, seats=8, budget=48,
            is_restored=is_restored, mask_seconds=mask_seconds)
        assert found == [alone(each) for each in chosen]
    assert mask_seconds or metrics.deferred_rows_total._value.get() > deferred


@pytest.mark.slow
@pytest.mark.parametrize("is_restored", [False, True], ids=["new", "restored"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mask_seconds", [0.0, math.inf])
@pytest.mark.parametrize("pool", [FEW, ENOUGH])
@pytest.mark.parametrize("drafts", ["suffix", "right", "mixed"])
def test_constrained_tokens_do_not_depend_on_drafts(
    runner: Runner, alone: Alone, drafts: Kind, pool: int, depth: int, is_restored: bool, mask_seconds: float
) -> None:
    """The masks along a draft are those that single tokens get. mask_seconds: rows are deferred, or none is."""
    answers = {(*case.ask().fields["prompt_ids"], case.sampling): alone(case).tokens for case in CASES}
    temperature = {params["temperature"]: name for name, params in constrained.SAMPLINGS.items()}

    def answer(sequence: Sequence) -> list[int]:
        request = sequence.request
        return answers[(*request.prompt_ids, temperature[request.sampling.temperature])]

    drafting = drafting_of(drafts, answer, constrained.VOCABULARY, runner.max_drafts)
    found, _ = constrained.answered(
        runner, CASES, alone, depth=depth, pool=pool, seats=8, budget=48, is_restored=is_restored,
        mask_seconds=mask_seconds, drafting=drafting)
    assert found == [alone(case) for case in CASES]
    assert drafting.accepted or drafts == "suffix" or is_restored or pool == FEW or not mask_seconds


@pytest.mark.full
@pytest.mark.parametrize("is_restored", [False, True], ids=["new", "restored"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pool", [4, 7, 12, ENOUGH])
@pytest.mark.parametrize("seats", [1, 3, 8])
@pytest.mark.parametrize("budget", [5, 16, 48])
def test_constrained_tokens_in_every_order(
    runner: Runner, alone: Alone, depth: int, pool: int, seats: int, budget: int, is_restored: bool
) -> None:
    """Prompts are computed in chunks of `budget` tokens, `seats` requests run at a time."""
    found, _ = constrained.answered(
        runner, CASES, alone, depth=depth, pool=pool, seats=seats, budget=budget, is_restored=is_restored)
    assert found == [alone(case) for case in CASES]
