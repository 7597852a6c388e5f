"""Explanations of requests that were delayed by each cause, on a timeline of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.npu.step import Row, Step
from npuserve.service.engine import request_history
from npuserve.service.engine.request_history import Calls, RequestHistory
from npuserve.service.ipc.explanations import Explanation
from npuserve.service.scheduling.phase_timer import PhaseTimer

USUAL = 0.01
"""Seconds of a usual decode step."""
NEIGHBOUR, OWN = 1, 2
"""Ids of sequences."""


class Timeline:
    """Clock that records steps, of which the first 40 are usual ones before the request."""

    def __init__(self) -> None:
        self.history = RequestHistory()
        self.now = 100.0
        self.timer = PhaseTimer(self.now, None)
        for _ in range(40):
            self.step(decodes=2, kernels={"linear": (10, 0.001)})
        self.arrive()

    def arrive(self) -> None:
        self.timer = PhaseTimer(self.now, None)

    def step(
        self, seconds: float = USUAL, decodes: int = 2, chunks: dict[int, int] | None = None, gap: float = 0.0,
        kernels: dict[str, Calls] | None = None
    ) -> None:
        """Record a step. chunks: tokens by sequence. gap: seconds before it in which the device waits."""
        began = self.now + gap
        self.now = began + seconds
        rows = [Row(10 + number, [7], 5, [1], True) for number in range(decodes)]
        rows += [Row(id, [7] * tokens, 0, [1], False) for id, tokens in (chunks or {}).items()]
        self.history.add(Step(rows), bool(chunks), began, self.now, kernels)

    def admit(self) -> None:
        self.timer.end_queue(self.now)

    def wait(self, seconds: float, is_pause: bool = False) -> None:
        """Let the request wait while steps run."""
        self.timer.end_step(False, 0.0, self.now)
        for _ in range(round(seconds / USUAL)):
            self.step()
        self.timer.end_queue(self.now, is_pause)

    def explain(self, num_deferred: int = 0, **fields: object) -> Explanation:
        if "num_computed_tokens" not in fields:
            self.timer.end_step(False, 0.0, self.now)
        sequence: Any = SimpleNamespace(**{
            "id": OWN, "timer": self.timer, "cached_tokens": 4, "num_generated_tokens": 20, "num_computed_tokens": 30,
            "num_deferred": num_deferred, "is_paused": False,
            "request": SimpleNamespace(request_id="r", client="c", index=0, prompt_ids=[1] * 10), **fields})
        self.history.end(sequence, self.now)
        (explanation,) = self.history.explain([], "r", "c", self.now)
        assert sum(delay.seconds for delay in explanation.delays) == pytest.approx(explanation.seconds)
        return explanation


def seconds(explanation: Explanation) -> dict[str, float]:
    return {delay.cause: round(delay.seconds, 6) for delay in explanation.delays}


def decode(timeline: Timeline, steps: int = 20) -> None:
    for _ in range(steps):
        timeline.step()


def test_explanation_of_a_request_without_delays_is_prefill_and_decode() -> None:
    timeline = Timeline()
    timeline.admit()
    timeline.step(0.03, chunks={OWN: 10})
    decode(timeline)
    explanation = timeline.explain()
    assert seconds(explanation) == {"decode": 0.2, "prefill": 0.03}
    assert (explanation.num_steps, explanation.is_complete, explanation.is_live) == (21, True, False)
    assert (explanation.prompt_tokens, explanation.cached_tokens, explanation.generated_tokens) == (10, 4, 20)


def test_explanation_divides_the_time_before_the_first_step() -> None:
    timeline = Timeline()
    timeline.now += 0.2
    timeline.timer.received = timeline.now
    timeline.now += 0.3
    timeline.timer.compiled = timeline.now
    for _ in range(50):
        timeline.step(decodes=8)
    timeline.admit()
    decode(timeline)
    explanation = timeline.explain()
    assert seconds(explanation) == {"queue": 0.5, "grammar": 0.3, "preparation": 0.2, "decode": 0.2}
    assert "8 requests ran meanwhile" in explanation.delays[0].detail


@pytest.mark.parametrize(("is_pause", "cause"), [(False, "preemption"), (True, "slow_reader")])
def test_explanation_of_a_wait_leaves_its_steps_out(is_pause: bool, cause: str) -> None:
    timeline = Timeline()
    timeline.admit()
    decode(timeline)
    timeline.wait(0.5, is_pause)
    timeline.step(0.03, chunks={OWN: 10})
    decode(timeline)
    explanation = timeline.explain()
    assert seconds(explanation) == {cause: 0.5, "decode": 0.4, "prefill": 0.03}
    assert explanation.num_steps == 41


def test_explanation_of_a_request_that_ends_while_it_is_preempted() -> None:
    timeline = Timeline()
    timeline.admit()
    decode(timeline)
    timeline.timer.end_step(False, 0.0, timeline.now)
    decode(timeline, 50)
    assert seconds(timeline.explain(num_computed_tokens=0)) == {"preemption": 0.5, "decode": 0.2}


def test_explanation_names_the_prompts_of_neighbours() -> None:
    timeline = Timeline()
    timeline.admit()
    decode(timeline)
    for _ in range(5):
        timeline.step(0.11, chunks={NEIGHBOUR: 512})
    explanation = timeline.explain()
    assert seconds(explanation) == {"neighbour_prefill": 0.5, "decode": 0.25}
    assert (explanation.delays[0].steps, explanation.delays[0].detail) == (5, "2560 prompt tokens of other requests")


def test_explanation_names_waits_for_masks_and_rows_computed_again() -> None:
    timeline = Timeline()
    timeline.admit()
    for _ in range(20):
        timeline.history.observe_masks(timeline.now + 0.001, 0.02)
        timeline.step(USUAL + 0.02)
    explanation = timeline.explain(num_deferred=10)
    assert seconds(explanation) == {"masks": 0.5, "decode": 0.1}
    assert explanation.delays[0].detail == "10 rows computed again"


def test_explanation_names_a_late_host() -> None:
    timeline = Timeline()
    timeline.admit()
    for _ in range(20):
        timeline.step(gap=0.03)
    assert seconds(timeline.explain()) == {"host": 0.6, "decode": 0.2}


def test_explanation_names_the_kernel_of_slow_steps() -> None:
    timeline = Timeline()
    timeline.admit()
    for _ in range(20):
        timeline.step(0.04, kernels={"linear": (10, 0.001), "paged_attention": (10, 0.02)})
    timeline.now += 1.0
    end = timeline.now
    for _ in range(30):
        timeline.step(kernels={"linear": (10, 0.001), "paged_attention": (10, 0.002)})
    timeline.now = end - 1.0
    explanation = timeline.explain()
    assert seconds(explanation) == {"slow_steps": 0.6, "decode": 0.2}
    assert explanation.delays[0].detail == "kernel paged_attention: 2000 µs, usually 200 µs"
    assert [(k.kernel, k.calls) for k in explanation.kernels] == [("paged_attention", 200), ("linear", 200)]


def test_explanation_says_when_steps_are_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_history, "MAX_STEPS", 30)
    timeline = Timeline()
    timeline.admit()
    decode(timeline, 60)
    timeline.timer.end_step(False, 0.0, timeline.now)
    sequence: Any = SimpleNamespace(
        id=OWN, timer=timeline.timer, cached_tokens=0, num_generated_tokens=60, num_computed_tokens=70, num_deferred=0,
        is_paused=False, request=SimpleNamespace(request_id="r", client="c", index=0, prompt_ids=[1]))
    (explanation,) = timeline.history.explain([sequence], "r", "", timeline.now)
    assert (explanation.is_complete, explanation.num_steps, explanation.is_live) == (False, 30, True)


def test_history_keeps_the_latest_ended_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_history, "MAX_ENDED", 3)
    history = RequestHistory()
    for number in range(5):
        sequence: Any = SimpleNamespace(
            id=number, timer=PhaseTimer(1.0, None), cached_tokens=0, num_generated_tokens=0, num_computed_tokens=0,
            num_deferred=0, is_paused=False,
            request=SimpleNamespace(request_id=f"r{number}", client="c", index=0, prompt_ids=[1]))
        history.end(sequence, 2.0)
    assert [len(history.explain([], f"r{number}", "", 3.0)) for number in range(5)] == [0, 0, 1, 1, 1]
    (never_ran,) = history.explain([], "r4", "", 3.0)
    assert seconds(never_ran) == {"queue": 1.0}
    assert history.explain([], "r4", "another", 3.0) == []
