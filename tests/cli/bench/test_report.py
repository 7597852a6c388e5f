"""Report of `npuserve bench serve` on timelines written by hand."""

from __future__ import annotations

import io
import statistics

import numpy as np
import pytest
from rich.console import Console

from npuserve.cli.bench import report as bench_report
from npuserve.cli.bench.load_generator import Outcome


def outcome(
    sent: float, *arrivals: tuple[float, int], end: float | None = None, code: str = "OK", due: float | None = None
) -> Outcome:
    end, due = arrivals[-1][0] if end is None else end, sent if due is None else due
    return Outcome(due, sent, end, code, "", list(arrivals), "FINISH_REASON_LENGTH", prompt_tokens=10)


def test_latencies_of_a_timeline_are_exact():
    one = outcome(1.0, (1.5, 1), (1.75, 1), (2.25, 2), end=2.5)
    assert bench_report.ttft(one) == 0.5
    assert bench_report.inter_token(one) == [0.25, 0.25, 0.25]
    assert bench_report.tpot(one) == pytest.approx((1.5 - 0.5) / 3)
    many_at_first = outcome(0.0, (1.0, 3), (2.0, 1))
    assert bench_report.inter_token(many_at_first) == [0.0, 0.0, 1.0]
    # Each token but the first has one gap, and the gaps add up to the time after the first token.
    assert sum(bench_report.inter_token(many_at_first)) == bench_report.tpot(many_at_first) * 3
    assert bench_report.tpot(outcome(0.0, (1.0, 1))) is None


def test_summary_percentiles_equal_the_standard_library():
    outcomes = [outcome(0.0, (0.001 * (i * 37 % 101 + 1), 1)) for i in range(101)]
    spread = bench_report.summary(outcomes, 1.0, 101)["latency_ms"]["ttft"]
    cuts = statistics.quantiles([1000 * bench_report.ttft(o) for o in outcomes], n=100, method="inclusive")
    assert spread["mean"] == pytest.approx(51)
    for percent in bench_report.PERCENTILES:
        assert spread[f"p{percent}"] == pytest.approx(cuts[percent - 1])
    assert spread["max"] == pytest.approx(101)


def test_summary_throughput_goodput_and_lag_are_exact():
    outcomes = [
        outcome(0.0, (0.1, 1), (0.3, 1)),  # TTFT 100 ms, TPOT 200 ms
        outcome(0.0, (0.4, 1), (0.45, 1)),  # TTFT too late
        outcome(0.5, (0.6, 1), (1.6, 1), due=0.25),  # TPOT too long
        outcome(1.0, (1.1, 1)),  # one token has no TPOT
        outcome(1.0, (1.05, 4), code="UNAVAILABLE"),
    ]
    figures = bench_report.summary(outcomes, 2.0, 6, slo_ttft=0.2, slo_tpot=0.3)
    assert figures["requests"] == {"asked": 6, "sent": 5, "ok": 4, "failed": {"UNAVAILABLE": 1}}
    assert figures["requests_per_second"] == 2.0
    assert figures["output_tokens_per_second"] == 11 / 2
    assert figures["total_tokens_per_second"] == (11 + 50) / 2
    assert figures["goodput_per_second"] == 1.0
    assert figures["peak_running"] == 3
    assert figures["latency_ms"]["lag"]["max"] == pytest.approx(250)
    assert figures["latency_ms"]["lag"]["mean"] == pytest.approx(50)
    assert figures["latency_ms"]["ttft"]["mean"] == pytest.approx(np.mean([100, 400, 350, 100]))
    assert figures["latency_ms"]["e2e"]["mean"] == pytest.approx(np.mean([300, 450, 1350, 100]))
    assert figures["latency_ms"]["tpot"]["mean"] == pytest.approx(np.mean([200, 50, 1000]))
    assert bench_report.summary(outcomes, 2.0, 6)["goodput_per_second"] is None
    assert bench_report.summary(outcomes, 2.0, 6, slo_ttft=0.2)["goodput_per_second"] == 1.0


def test_lag_warning_small_lag_is_empty():
    figures = bench_report.summary([outcome(0.009, (0.1, 1), due=0.0), outcome(0.0, (0.1, 1))], 1.0, 2)
    assert bench_report.lag_warning(figures) == ""
    assert bench_report.lag_warning(bench_report.summary([], 1.0, 2)) == ""


def test_running_is_a_step_function():
    times, counts = bench_report.running([outcome(0.0, (2.0, 1)), outcome(1.0, (3.0, 1)), outcome(2.0, (4.0, 1))])
    assert times.tolist() == [0, 1, 2, 3, 4]
    assert counts.tolist() == [1, 2, 2, 1, 0]


def test_show_prints_counts_latencies_and_goodput():
    text = io.StringIO()
    outcomes = [outcome(0.0, (0.1, 1), (0.3, 1)), outcome(0.0, (0.1, 1), code="UNAVAILABLE")]
    bench_report.show(bench_report.summary(outcomes, 2.0, 3, slo_ttft=1.0), Console(file=text, width=100))
    for part in ("1 ok, 1 UNAVAILABLE failed, 1 not sent", "100.00", "200.00", "0.50", "p99", "client's lag"):
        assert part in text.getvalue()
    bench_report.show(bench_report.summary([], 1.0, 3), Console(file=text))
