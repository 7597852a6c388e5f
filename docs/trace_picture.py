"""Picture of one step in the trace of a profile, for docs/profiling.md.

    python docs/trace_picture.py TRACE docs/profile.png [--step 5]

TRACE: file of a profile of a server on the CPU. Needs `pip install npuserve[bench]`.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Event = dict[str, Any]
SHOWN = 7
"""Kernels with a color and a line in the legend; the others share one."""


def read(file: Path) -> list[Event]:
    """Return the events of a trace that have a duration."""
    data = file.read_bytes()
    trace = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def draw(events: list[Event], step: int, out: Path) -> None:
    """Draw the tracks from the launch of `step` to its end. Raises ValueError if the trace lacks it."""
    own = [event for event in events if event["args"].get("step") == step]
    device = [event for event in own if event["cat"] == "step"]
    if not device:
        raise ValueError(f"the trace has no step {step} with times")
    begin, end = min(event["ts"] for event in own), max(event["ts"] + event["dur"] for event in own)
    spent: dict[str, float] = defaultdict(float)
    for event in own:
        if event["cat"] == "kernel":
            spent[event["name"]] += event["dur"]
    names = sorted(spent, key=lambda name: -spent[name])
    colors = dict(zip(names[:SHOWN], plt.get_cmap("tab10").colors, strict=False))
    figure, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
    tracks = {"host": 2, "step": 1, "kernel": 0}
    for event in events:
        if event["ts"] + event["dur"] < begin or event["ts"] > end:
            continue
        color = {"host": "0.55", "step": "0.8"}.get(event["cat"]) or colors.get(event["name"], "0.3")
        axes.broken_barh([(event["ts"] - begin, event["dur"])], (tracks[event["cat"]] - 0.4, 0.8), facecolors=color,
                         edgecolor="white", linewidth=0.2)
        if event["cat"] != "kernel":
            axes.text(max(event["ts"], begin) - begin, tracks[event["cat"]] + 0.45,
                      f"{event['name']} {event['args']['step']}", fontsize=7)
    for name in names[:SHOWN]:
        axes.plot([], [], color=colors[name], linewidth=6, label=f"{name}, {spent[name]:.0f} µs")
    if others := sum(spent[name] for name in names[SHOWN:]):
        axes.plot([], [], color="0.3", linewidth=6, label=f"others, {others:.0f} µs")
    axes.set(yticks=[2, 1, 0], yticklabels=["host", "steps", "kernels"], xlim=(0, end - begin), ylim=(-0.6, 2.8),
             xlabel=f"µs from the launch of step {step} ({device[0]['args']['rows']} rows)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, default=5, help="number of the step (default: %(default)s)")
    args = parser.parse_args()
    draw(read(args.trace), args.step, args.out)


if __name__ == "__main__":
    main()
