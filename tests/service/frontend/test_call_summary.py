"""Metrics and log fields of a call's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.service.config import ServerConfig
from npuserve.service.frontend.call_summary import CallSummary
from npuserve.service.ipc.messages import Timing
from npuserve.v1 import generate_pb2 as pb
from tests.service.frontend.test_inference import metric

CONFIG = ServerConfig(target_ttft_seconds=1.0, target_itl_seconds=0.1)
TIMING = Timing(0.0, [0.25, 0.5], 2.0, 0.0, 0.0, 0.0)


def finish(summary: CallSummary, generated: int, first: float | None, last: float | None, index: int = 0) -> None:
    """End an answer whose request arrived at 10 s. first, last: times of its first and last token."""
    usage = pb.Usage(prompt_tokens=5, cached_tokens=index + 1, generated_tokens=generated)
    stream: Any = SimpleNamespace(
        first_token=first, last_token=last, request=SimpleNamespace(index=index, arrival=10.0))
    summary.finished(pb.Finish(reason=pb.FINISH_REASON_LENGTH, usage=usage), TIMING, stream)


@pytest.mark.parametrize(("generated", "first", "last", "is_on_target"), [
    (11, 11.0, 12.0, True), (11, 11.0, 12.25, False), (11, 11.25, 12.0, False),
    (1, 11.0, 11.0, True), (1, 11.25, 11.25, False), (0, None, None, False), (11, None, 12.0, False),
])
def test_finished_counts_requests_on_target(
    generated: int, first: float | None, last: float | None, is_on_target: bool
) -> None:
    """By the time to the first token, and the mean time between tokens; neither is known of a resumed stream."""
    before = metric("requests_on_target_total")
    finish(CallSummary(CONFIG, "m", 1, {}, None), generated, first, last)
    assert metric("requests_on_target_total") - before == is_on_target


def test_finished_observes_the_answer() -> None:
    expected = {
        "request_prompt_tokens_sum": 5, "request_generation_tokens_sum": 11, "prefill_time_seconds_sum": 0.75,
        "decode_time_seconds_sum": 2, "e2e_request_latency_seconds_sum": 3, "time_per_output_token_seconds_sum": 0.25}
    before = {name: metric(name) for name in expected}
    finish(CallSummary(CONFIG, "m", 1, {}, None), 11, 10.5, 13.0)
    assert {name: metric(name) - before[name] for name in expected} == pytest.approx(expected)


def test_finished_observes_the_time_per_token_of_answers_with_several() -> None:
    names = [f"time_per_output_token_seconds_{part}" for part in ("count", "sum")]
    before = [metric(name) for name in names]
    for generated, last in ((1, 10.5), (2, 10.75)):
        fields: dict[str, Any] = {}
        finish(CallSummary(CONFIG, "m", 1, fields, None), generated, 10.5, last)
    assert [metric(name) - old for name, old in zip(names, before, strict=True)] == pytest.approx([1, 0.25])
    assert fields == {"reason": "length", "cached_tokens": 1, "generated_tokens": 2, "ttft": 0.5, "e2e": 0.75}


def test_finished_of_samples_adds_up_their_fields() -> None:
    fields: dict[str, Any] = {}
    traced: list[object] = []
    trace: Any = SimpleNamespace(finished=lambda *arguments: traced.append(arguments))
    summary = CallSummary(CONFIG, "m", 3, fields, trace)
    finish(summary, 4, 10.5, 14.0, index=1)
    finish(summary, 2, 10.25, 13.0, index=0)
    finish(summary, 1, 10.75, 10.75, index=2)
    assert fields == {
        "samples": 3, "reason": "length,length,length", "cached_tokens": 1, "generated_tokens": 7, "ttft": 0.25,
        "e2e": 4.0}
    assert traced == [(TIMING, "m", 10.25)]
