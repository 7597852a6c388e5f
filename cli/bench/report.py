"""Report of `npuserve bench serve`: statistics, tables for the terminal, JSON and a plot.

Latencies cover requests that ended OK. They begin at the due time. In an open loop that is the scheduled time, so that
a slow load generator cannot hide a queue; in a closed loop it is the time of sending.

TTFT: until the first message with tokens.
e2e: until the end of the stream.
TPOT: (e2e - TTFT) / (n - 1) for n tokens, one number per request.
ITL: one number per token except the first. A message of k tokens after a gap g counts k times as g / k. The other
    tokens of the first message count as 0.
Lag: from due to sent, over all requests. It is part of TTFT and e2e. A run whose lag is not small compared with TTFT
    measures the load generator.

Percentiles interpolate linearly between the closest ranks (numpy's default).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from npuserve.cli.bench.load_generator import Outcome

PERCENTILES = (50, 90, 95, 99)
MAX_LAG_SHARE = 0.1
Floats = npt.NDArray[np.float64]


def ttft(outcome: Outcome) -> float:
    """Return the seconds from due to the first token; infinite if none came."""
    return outcome.arrivals[0][0] - outcome.due if outcome.arrivals else float("inf")


def end_to_end(outcome: Outcome) -> float:
    """Return the seconds from due to the end of the stream."""
    return outcome.end - outcome.due


def tokens(outcome: Outcome) -> int:
    """Return the number of tokens received."""
    return sum(count for _, count in outcome.arrivals)


def tpot(outcome: Outcome) -> float | None:
    """Return the seconds per token after the first; None for fewer than two tokens."""
    n = tokens(outcome)
    return (end_to_end(outcome) - ttft(outcome)) / (n - 1) if n > 1 else None


def inter_token(outcome: Outcome) -> list[float]:
    """Return the seconds before each token except the first."""
    gaps = []
    for index, (time, count) in enumerate(outcome.arrivals):
        gaps += [0.0] * (count - 1) if index == 0 else [(time - outcome.arrivals[index - 1][0]) / count] * count
    return gaps


def meets(outcome: Outcome, slo_ttft: float | None, slo_tpot: float | None) -> bool:
    """Return whether the request ended OK within the targets in seconds (None: no target). One token has no TPOT."""
    return (outcome.ok and ttft(outcome) <= (float("inf") if slo_ttft is None else slo_ttft)
            and (tpot(outcome) or 0.0) <= (float("inf") if slo_tpot is None else slo_tpot))


def latencies(outcomes: Sequence[Outcome]) -> dict[str, Floats]:
    """Return the samples in seconds by name: ttft, itl, tpot, e2e, lag."""
    ok = [o for o in outcomes if o.ok and o.arrivals]
    samples = {
        "ttft": [ttft(o) for o in ok],
        "itl": [gap for o in ok for gap in inter_token(o)],
        "tpot": [value for o in ok if (value := tpot(o)) is not None],
        "e2e": [end_to_end(o) for o in ok],
        "lag": [o.sent - o.due for o in outcomes],
    }
    return {name: np.array(values, dtype=np.float64) for name, values in samples.items()}


def summary(
    outcomes: Sequence[Outcome], seconds: float, asked: int,
    slo_ttft: float | None = None, slo_tpot: float | None = None,
) -> dict[str, Any]:
    """Return all figures of a run.

    Tokens include the received tokens of failed requests. Prompt tokens cover only requests with a Finish.
    goodput_per_second counts requests that met both targets; None without a target.

    seconds: duration of the run.
    asked: number of requests to send, including unsent requests.
    slo_ttft, slo_tpot: targets in seconds.
    """
    ok = sum(o.ok for o in outcomes)
    output = sum(map(tokens, outcomes))
    prompt = sum(o.prompt_tokens for o in outcomes)
    good = None if slo_ttft is None and slo_tpot is None else sum(meets(o, slo_ttft, slo_tpot) for o in outcomes)
    return {
        "seconds": seconds,
        "requests": {
            "asked": asked, "sent": len(outcomes), "ok": ok,
            "failed": dict(Counter(o.code for o in outcomes if not o.ok)),
        },
        "finish_reasons": dict(Counter(o.reason for o in outcomes if o.reason)),
        "tokens": {"prompt": prompt, "cached": sum(o.cached_tokens for o in outcomes), "output": output},
        "requests_per_second": ok / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "goodput_per_second": None if good is None else good / seconds,
        "peak_running": int(max(running(outcomes)[1], default=0)),
        "latency_ms": {name: _spread(1000 * values) for name, values in latencies(outcomes).items()},
    }


def lag_warning(figures: dict[str, Any]) -> str:
    """Return a sentence if the p99 lag is at least a tenth of the median TTFT, otherwise an empty string."""
    lag, first = (figures["latency_ms"][name] for name in ("lag", "ttft"))
    if not lag or not first or lag["p99"] < MAX_LAG_SHARE * first["p50"]:
        return ""
    return (f"the load generator sent late: lag p99 {lag['p99']:.1f} ms, TTFT p50 {first['p50']:.1f} ms; TTFT and end "
            "to end include the lag")


def _spread(values: Floats) -> dict[str, float] | None:
    if not values.size:
        return None
    points = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), **points, "max": float(values.max())}


def running(outcomes: Sequence[Outcome]) -> tuple[Floats, Floats]:
    """Return the number of running requests as a step function: times in seconds, and the count from each time on."""
    changes: Counter[float] = Counter()
    for outcome in outcomes:
        changes[outcome.sent] += 1
        changes[outcome.end] -= 1
    times = sorted(changes)
    return np.array(times), np.cumsum([changes[time] for time in times], dtype=np.float64)


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    requests = figures["requests"]
    totals = Table("", "", show_header=False, box=None)
    reasons = figures["finish_reasons"].items()
    failed = ", ".join(f"{count} {code}" for code, count in sorted(requests["failed"].items())) or "0"
    lines = {
        "requests": f"{requests['ok']} ok, {failed} failed, {requests['asked'] - requests['sent']} not sent"
                    f" (at most {figures['peak_running']} at once)",
        "finish reasons": ", ".join(f"{n} {r.removeprefix('FINISH_REASON_')}" for r, n in reasons),
        "seconds": f"{figures['seconds']:.2f}",
        "tokens": "{prompt} prompt ({cached} cached), {output} output".format(**figures["tokens"]),
        "requests/s": f"{figures['requests_per_second']:.2f}",
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "total tokens/s": f"{figures['total_tokens_per_second']:.1f}",
    }
    if figures["goodput_per_second"] is not None:
        lines["goodput, requests/s"] = f"{figures['goodput_per_second']:.2f}"
    for name, value in lines.items():
        totals.add_row(name, value)
    spread = Table("milliseconds")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    for column in columns:
        spread.add_column(column, justify="right")
    names = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "end to end", "lag": "client's lag"}
    for name, title in names.items():
        values = figures["latency_ms"][name]
        spread.add_row(title, *(f"{values[c]:.2f}" if values else "-" for c in columns))
    console.print(totals)
    console.print(spread)


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one object per request for the JSON file; times are seconds since the start of the run."""
    return [
        {
            "due": o.due, "sent": o.sent, "end": o.end, "code": o.code, "detail": o.detail, "reason": o.reason,
            "first_token": o.arrivals[0][0] if o.arrivals else None, "prompt_tokens": o.prompt_tokens,
            "cached_tokens": o.cached_tokens, "output_tokens": tokens(o), "tpot": tpot(o),
        }
        for o in outcomes
    ]


def plot(outcomes: Sequence[Outcome], seconds: float, path: Path) -> None:
    """Plot the distributions of TTFT, ITL and TPOT, and a timeline of running requests and tokens per second.

    The file's suffix selects the format. Needs `pip install npuserve[bench]`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplot_mosaic([["ttft", "itl", "tpot"], ["line", "line", "line"]])
    samples = latencies(outcomes)
    for name in ("ttft", "itl", "tpot"):
        axis = axes[name]
        values = np.sort(1000 * samples[name])
        axis.step(values, np.arange(1, values.size + 1) / max(1, values.size), where="post")
        axis.set(title=name.upper(), xlabel="ms", ylabel="share of " + ("tokens" if name == "itl" else "requests"),
                 ylim=(0, 1))
        axis.grid(alpha=0.3)
    line = axes["line"]
    line.step(*running(outcomes), where="post", color="tab:blue")
    line.set(xlabel="seconds", ylabel="running requests", xlim=(0, seconds), ylim=(0, None))
    received = np.array([arrival for o in outcomes for arrival in o.arrivals], dtype=np.float64).reshape(-1, 2)
    bins = max(10, min(200, int(seconds)))
    counts, edges = np.histogram(received[:, 0], bins=bins, range=(0, seconds), weights=received[:, 1])
    rate = line.twinx()
    rate.stairs(counts * bins / seconds, edges, color="tab:orange")
    rate.set(ylabel="output tokens/s", ylim=(0, None))
    rate.yaxis.label.set_color("tab:orange")
    line.yaxis.label.set_color("tab:blue")
    figure.savefig(path)
