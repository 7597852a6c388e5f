"""Heads for multi-token prediction on the emulated Ascend device: captured drafts, and answers without them."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu import emulator
from npuserve.npu.backends.base import BackendError, CaptureError
from npuserve.npu.execution import draft_buffers
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.ascend.test_ranks import EXEC_SECONDS, SMALL_BUFFER, from_first, loaded, share
from tests.npu.backends.ascend.test_sampled_steps import refuse_in_captures
from tests.npu.backends.eagle import saved_eagle
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.mixture import Family, saved_mixture
from tests.npu.backends.mtp import add_head
from tests.npu.backends.small import GREEDY, ids_of, saved
from tests.npu.emulator.child import emulated
from tests.npu.emulator.ranks import Place, on_ranks
from tests.support import loop
from tests.support.recorded_drafting import RecordedDrafting, StoppedDrafting

DEPTH = 3
MEMORY: dict[str, Any] = {"kv_cache_memory": 24 << 20, "max_drafts": 16, "draft_depth": DEPTH}


def on_npu(folder: Path, **settings: Any) -> Runner:
    return load(folder, decode_buckets=(2, 4), **{**MEMORY, **settings})


def on_cpu(folder: Path, **settings: Any) -> Runner:
    return load(folder, "cpu", block_size=128, threads=1, **{**MEMORY, **settings})


def asks(number: int, count: int, **sampling: Any) -> list[loop.Ask]:
    return [loop.Ask(3 * seed, None, {
        "prompt_ids": ids_of(5 + 9 * seed, seed), "max_tokens": count + seed, "bypass_prefix_cache": True,
        "sampling": SamplingParams(seed=seed, **({"temperature": 0.0} | sampling))}) for seed in range(number)]


def answered(
    runner: Runner, requests: list[loop.Ask], depth: int = DEPTH, in_flight: int = 2
) -> tuple[list[loop.Answer], RecordedDrafting]:
    """Return the answers with drafts, and the drafts."""
    drafting = RecordedDrafting(depth, runner.max_drafts, runner.block_size if runner.num_slots else 0)
    answers, _ = loop.serve(runner, requests, in_flight, 40, 4, 48, drafting=drafting)
    return answers, drafting


def assert_equal_without(folder: Path, requests: list[loop.Ask], *, depth: int = DEPTH, **settings: Any) -> None:
    """Compare tokens and log-probabilities with those of the same device without a head, and drafts with the CPU's."""
    plain, _ = loop.serve(on_npu(folder, **settings), requests, 2, 40, 4, 48)
    npu = on_npu(folder, mtp="on", draft_depth=depth, **settings)
    assert npu.predicts
    answers, drafting = answered(npu, requests, depth)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    for one, other in zip(answers, plain, strict=True):
        assert [report.logprob for report in one.logprobs] == pytest.approx(
            [report.logprob for report in other.logprobs], abs=1e-4)
    assert 0.1 * drafting.drafted < drafting.accepted < drafting.drafted, (drafting.accepted, drafting.drafted)
    _, expected = answered(on_cpu(folder, mtp="on", **settings), requests, depth)
    of_cpu = {tuple(tokens): drafts for tokens, drafts in expected.drafts}
    compared = [(drafts, of_cpu[tuple(tokens)]) for tokens, drafts in drafting.drafts if tuple(tokens) in of_cpu]
    assert len(compared) > 10
    assert max(len(drafts) for drafts, _ in compared) == depth
    different = [pair for pair in compared if pair[0] != pair[1]]
    assert len(different) <= len(compared) // 10, different


LAYERS: dict[str, dict[str, Any]] = {
    "hybrid": {"layers": 2, "full": (1,)}, "dense": {"layers": 2, "full": (0, 1), "head_dim": 128}}
DAMPING = {"hybrid": 0.1, "dense": 0.3}


def saved_with_head(folder: Path, layers: str) -> Path:
    return add_head(saved_hybrid(folder, **LAYERS[layers]), damping=DAMPING[layers])


@pytest.mark.parametrize(("layers", "sampling"), [
    ("hybrid", {"temperature": 0.7}), ("dense", {"logprobs": 2}), *(
        pytest.param(*case, marks=pytest.mark.full) for case in (
            ("hybrid", {}), ("hybrid", {"logprobs": 2}), ("dense", {}), ("dense", {"temperature": 0.7})))], ids=str)
@emulated(relax=RELAX, poison=True)
def test_mtp_answers_equal_those_without(tmp_path: Path, layers: str, sampling: dict[str, Any]) -> None:
    assert_equal_without(saved_with_head(tmp_path, layers), asks(4, 14, **sampling))


@pytest.mark.full
@emulated(relax=RELAX, poison=True)
def test_mtp_answers_of_one_draft_a_row_equal_those_without(tmp_path: Path) -> None:
    assert_equal_without(saved_with_head(tmp_path, "hybrid"), asks(4, 14), depth=1)


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 1 + DEPTH])
@emulated(relax=RELAX, poison=True)
def test_mtp_drafts_of_timed_steps_equal_those_of_captured_ones(tmp_path: Path, tokens: int) -> None:
    """Their kernels are called one by one. Three rows are fewer than those of a captured step."""
    saved_with_head(tmp_path, "hybrid")
    rows = range(3)
    first = Step([Row(i, [5, 7, 9 + i], 0, [i], 1, state_slot=i, predicts=DEPTH) for i in rows],
                 [NewRequest(i, [5, 7, 9 + i], [], GREEDY) for i in rows])
    steps = [first, *(Step([
        Row(i, [5 + i] * tokens, 3 + step * tokens, [i], tokens, state_slot=i, predicts=DEPTH) for i in rows])
        for step in range(4))]
    results = []
    for kernel_sampling in (0, 2):
        runner = on_npu(tmp_path, mtp="on", kernel_sampling=kernel_sampling, observe=lambda *_: None)
        results.append([runner.collect(runner.launch(step)) for step in steps])
    assert [result.timed for result in results[1]] == [True, False] * 2 + [True]
    for captured, timed in zip(*results, strict=True):
        assert (timed.token_ids, timed.drafts) == (captured.token_ids, captured.drafts)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@emulated(relax=RELAX, poison=True)
def test_mtp_answers_of_experts_equal_those_without(tmp_path: Path, family: Family) -> None:
    assert_equal_without(add_head(saved_mixture(tmp_path, family), damping=0.2), asks(3, 14))


@emulated(relax=RELAX, poison=True)
def test_mtp_answers_without_captures_equal_those_without_a_head(tmp_path: Path) -> None:
    """Kernel by kernel, the host does not wait for the number of right drafts either."""
    assert_equal_without(saved_with_head(tmp_path, "hybrid"), asks(3, 14), capture="off")


@emulated(relax=RELAX, poison=True)
def test_mtp_answers_equal_those_without_after_prefix_hits_and_in_few_blocks(tmp_path: Path) -> None:
    """Rows end at the end of the context, or have no block for drafts after them."""
    saved_with_head(tmp_path, "dense")
    long = [loop.Ask(5 * index, None, {"prompt_ids": ids_of(250, index % 2), "max_tokens": 20, "sampling": GREEDY})
            for index in range(4)]
    short = [loop.Ask(0, None, {"prompt_ids": ids_of(110, index), "max_tokens": 30, "sampling": GREEDY})
             for index in range(4)]
    without = on_npu(tmp_path)
    npu = on_npu(tmp_path, mtp="on", max_model_len=270)
    for mode, requests, pool in (("mtp", long, 40), ("auto", short, 4)):
        plain, _ = loop.serve(without, requests, 2, 40, 4, 48)
        drafting = RecordedDrafting(DEPTH, npu.max_drafts, mode=mode)  # type: ignore[arg-type]
        answers, scheduler = loop.serve(npu, requests, 2, pool, 4, 48, drafting=drafting)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        assert scheduler.memory.prefix_hits or pool < 40
        assert drafting.drafts


@pytest.mark.parametrize(("drafter", "capture"), [
    ("eagle", "auto"), ("model", "auto"), *(
        pytest.param(name, "off", marks=pytest.mark.full) for name in ("model", "eagle"))])
@emulated(relax=RELAX, poison=True)
def test_draft_model_answers_equal_those_without(tmp_path: Path, drafter: str, capture: str) -> None:
    """A smaller model with the same vocabulary, or an EAGLE-3 head, drafts in one dispatch, too."""
    saved(tmp_path / "model")
    if drafter == "model":
        saved(tmp_path / "draft", layers=1, seed=0)
    else:
        saved_eagle(tmp_path / "draft")
    requests = asks(3, 14)
    plain, _ = loop.serve(on_npu(tmp_path / "model"), requests, 2, 40, 4, 48)
    drafts = []
    for runner in (on_npu(tmp_path / "model", draft=tmp_path / "draft", capture=capture),
                   on_cpu(tmp_path / "model", draft=tmp_path / "draft")):
        drafting = RecordedDrafting(DEPTH, runner.max_drafts, mode="model")
        answers, _ = loop.serve(runner, requests, 2, 40, 4, 48, drafting=drafting)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        drafts.append(drafting.drafts)
    assert len(drafts[0]) > 10
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("tokens", [1, 1 + DEPTH])
@emulated(relax=RELAX)
def test_mtp_step_is_two_replays(tmp_path: Path, tokens: int) -> None:
    """One verifies the drafts of a step, and one drafts; the ids and the drafts are one copy."""
    runner = on_npu(saved_with_head(tmp_path, "hybrid"), mtp="on")
    rows, here = range(3), threading.get_native_id()
    runner.collect(runner.launch(Step(
        [Row(i, [5, 7, 9], 0, [i], 1, state_slot=i, predicts=DEPTH) for i in rows],
        [NewRequest(i, [5, 7, 9], [], GREEDY) for i in rows])))
    for step in range(4):
        runner.backend._lengths.check(runner.backend._lengths.given)  # type: ignore[attr-defined]
        emulator.clear_calls()
        result = runner.collect(runner.launch(Step([
            Row(i, [5] * tokens, 3 + step * tokens, [i], tokens, state_slot=i, predicts=DEPTH) for i in rows])))
    own = Counter(call.name for call in emulator.calls() if call.thread == here)
    assert result.captured
    assert {len(drafts) for drafts in result.drafts.values()} == {DEPTH}
    assert own["aclmdlRIExecuteAsync"] == 2
    assert own.total() <= 12, own


@emulated(relax=RELAX)
def test_mtp_with_an_int8_cache_is_refused_by_name(tmp_path: Path) -> None:
    """Rows of several tokens are not captured there. With `auto`, the head is not loaded."""
    saved_with_head(tmp_path, "dense")
    with pytest.raises(BackendError, match=r"speculate: mtp is not possible on npu: .*, since kv_cache_dtype is int8"):
        on_npu(tmp_path, mtp="on", kv_cache_dtype="int8")
    with pytest.raises(BackendError, match="since capture_chunks is off, and would take much longer"):
        on_npu(tmp_path, mtp="on", capture_chunks=False)
    assert not on_npu(tmp_path, mtp="auto", kv_cache_dtype="int8").predicts


@emulated(relax=RELAX)
def test_mtp_drafts_only_after_as_many_samples_as_padding_has_slots(tmp_path: Path) -> None:
    """Steps of more rows draft nothing, and none is captured for them."""
    saved_with_head(tmp_path, "hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_buffers, "MAX_DRAFTED_SAMPLES", 3)
        runner = on_npu(tmp_path, mtp="on")
        assert runner.max_drafted_samples == 3
        drafts = runner._dispatch.decodes.drafts
        assert {depth: captured.largest for depth, captured in drafts.items()} == {0: 4, DEPTH: 2}
        answers, drafting = answered(runner, asks(4, 14))
    plain, _ = loop.serve(on_npu(tmp_path), asks(4, 14), 2, 40, 4, 48)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert drafting.accepted


@pytest.mark.full
@emulated(relax=RELAX, poison=True)
def test_mtp_answers_with_a_head_that_is_stopped_equal_those_without(tmp_path: Path) -> None:
    """The head returns to requests in progress and to prefixes that were computed without it. Captured for any number
    of drafts, or kernel by kernel, it drafts as on the CPU."""
    add_head(saved_hybrid(tmp_path, **LAYERS["dense"]), damping=1.0)  # drafts depend on what attention reads
    requests = [loop.Ask(6 * index, None, {
        "prompt_ids": ids_of(140, 0) + ids_of(3 + index, index), "max_tokens": 14, "sampling": GREEDY})
        for index in range(4)]
    plain, _ = loop.serve(on_npu(tmp_path), requests, 2, 40, 4, 48)
    runs = []
    npu = on_npu(tmp_path, mtp="auto")
    assert set(npu._dispatch.decodes.drafts) == set(range(1 + DEPTH))
    for runner in (npu, on_npu(tmp_path, mtp="auto", capture="off"), on_cpu(tmp_path, mtp="auto")):
        drafting = StoppedDrafting(2, runner.max_drafts, lambda step: step % 13 > 3)
        answers, scheduler = loop.serve(runner, requests, 2, 40, 4, 48, drafting=drafting)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        assert scheduler.memory.prefix_hits
        runs.append({tuple(tokens): drafts for tokens, drafts in drafting.drafts})
    assert len(runs[0]) > 10
    for other in runs[1:]:
        pairs = [(drafts, other[tokens]) for tokens, drafts in runs[0].items() if tokens in other]
        assert len(pairs) > 10
        assert sum(one != two for one, two in pairs) <= len(pairs) // 10


@emulated(relax=RELAX, fresh=True)
def test_refused_drafting_leaves_the_steps_captured(tmp_path: Path) -> None:
    """The log names the operator, and drafting runs kernel by kernel."""
    saved_with_head(tmp_path, "hybrid")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("npuserve.npu.execution.capture")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    refuse_in_captures("aclnnLogicalAnd")
    runner = on_npu(tmp_path, mtp="on")
    emulator.heal()
    (said,) = warned
    assert said.startswith("device: steps cannot be captured with aclnnLogicalAnd")
    assert said.endswith("Drafting runs kernel by kernel after captured steps, which is slower")
    captured = runner._dispatch
    assert all([captured.decodes.argmax, captured.decodes.sampled, captured.chunks.argmax])
    assert (captured.decodes.drafts, captured.chunks.drafts) == ({}, {})
    answers, drafting = answered(runner, asks(3, 14))
    cpu, _ = answered(on_cpu(tmp_path, mtp="on"), asks(3, 14))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in cpu]
    assert drafting.accepted


@pytest.mark.slow
@on_ranks(joined=False, relax=RELAX, environment=SMALL_BUFFER)
def test_mtp_is_off_on_all_ranks_if_one_captures_no_chunks(place: Place, tmp_path: Path) -> None:
    folder = share(place, "model", lambda: add_head(
        saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4)))
    settings = {"decode_buckets": (1, 4), "mtp": "auto", **MEMORY}
    runner, _ = loaded(place, folder, capture_chunks=place.rank == 0, **settings)
    assert not runner.predicts
    assert runner._dispatch.decodes.hidden
    assert runner._dispatch.chunks.hidden is None


@pytest.mark.slow
@on_ranks(joined=False, relax=RELAX, environment=SMALL_BUFFER)
def test_mtp_answers_of_two_ranks_equal_those_of_one_device(place: Place, tmp_path: Path) -> None:
    """Each rank drafts with its part of the head."""
    folder = share(place, "model", lambda: add_head(
        saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4)))
    settings = {"decode_buckets": (1, 4), "mtp": "on", **MEMORY}
    runner, _ = loaded(place, folder, **settings)
    answers, drafting = answered(runner, asks(3, 10))
    one = from_first(place, "answers", lambda: json.dumps(
        [answer.tokens for answer in answered(load(folder, **settings), asks(3, 10))[0]]))
    assert [answer.tokens for answer in answers] == json.loads(one)
    assert 0 < drafting.accepted < drafting.drafted


@pytest.mark.full
@on_ranks(joined=False, relax=RELAX, environment={"HCCL_EXEC_TIMEOUT": EXEC_SECONDS, **SMALL_BUFFER})
def test_rank_that_cannot_capture_drafting_fails(place: Place, tmp_path: Path) -> None:
    """Drafting that is not captured has other sizes than that of the other ranks. The next group captures none."""
    folder = share(place, "model", lambda: add_head(
        saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4)))
    settings = {"decode_buckets": (1, 4), "mtp": "on", **MEMORY}
    if place.rank:
        refuse_in_captures("aclnnLogicalAnd")
        with pytest.raises(CaptureError, match="aclnnLogicalAnd") as refused:
            loaded(place, folder, **settings)
        assert refused.value.next_mode == "decoder"
    else:
        with pytest.raises(RuntimeError, match="507048"):  # it warms up for its next graph
            loaded(place, folder, **settings)


@pytest.mark.full
@on_ranks(joined=False, relax=RELAX, environment=SMALL_BUFFER)
def test_no_rank_captures_drafting_if_one_may_not(place: Place, tmp_path: Path) -> None:
    """So starts the group after a rank could not capture drafting."""
    folder = share(place, "model", lambda: add_head(
        saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4)))
    settings = {"decode_buckets": (1, 4), "mtp": "on", **MEMORY}
    runner, _ = loaded(place, folder, capture="decoder" if place.rank else "auto", **settings)
    captured = runner._dispatch
    assert captured.decodes.hidden
    assert captured.chunks.hidden
    assert (captured.decodes.drafts, captured.chunks.drafts) == ({}, {})
    answers, drafting = answered(runner, asks(3, 10))
    one = from_first(place, "answers", lambda: json.dumps(
        [answer.tokens for answer in answered(load(folder, **settings), asks(3, 10))[0]]))
    assert [answer.tokens for answer in answers] == json.loads(one)
    assert 0 < drafting.accepted < drafting.drafted
