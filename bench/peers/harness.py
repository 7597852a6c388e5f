"""Command line, measures and timing of every contestant's script.

    PYTHON bench/peers/SCRIPT.py MODEL [--measures decode-1x512,prefill-512] [--repeats 3] [--threads 2]

Prints one JSON object per line and measure: `value`, tokens per second, is the median of `samples`. Needs only the
standard library, since each contestant runs in an environment of its own. Measures:

    decode-ROWSxCONTEXT   prompts of CONTEXT tokens; tokens per second of all rows together, over `--tokens` steps that
                          give every row one token, after WARM_UP such steps
    prefill-TOKENS        one prompt; its tokens per second until the first new token is known

Greedy, without prefix cache; the end-of-text token is ignored; loading and a first run of each measure do not count.
`others` is the CPU time of all other processes during the timed steps, in cores. A sample is valid if that is at most
QUIET. Otherwise it is taken again, up to TRIES times; then the quietest one counts, and its `others` is reported.

With --serve the measures are JSON lines on stdin, `{"measure": ..., "prompts": [[id, ...], ...]}`, one sample each,
after one line on stdout once the model is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MEASURES = ["decode-1x512", "decode-8x128", "decode-32x128", "prefill-512", "prefill-4096", "decode-1x8192"]
WARM_UP = 4
QUIET = 0.15
TRIES = 6
WAIT_SECONDS = 20.0

Sample = dict[str, float]
"""value: tokens per second. others: cores. Further items depend on the contestant."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measure:
    rows: int
    context: int
    decode: bool

    @classmethod
    def parse(cls, name: str) -> Measure:
        """Return the measure of this name. Raises ValueError if there is none."""
        if match := re.fullmatch(r"decode-([1-9]\d*)x([1-9]\d*)", name):
            return cls(int(match[1]), int(match[2]), True)
        if match := re.fullmatch(r"prefill-([1-9]\d*)", name):
            return cls(1, int(match[1]), False)
        raise ValueError(f"measure: {name!r} is neither decode-ROWSxCONTEXT nor prefill-TOKENS")

    def random_prompts(self, vocabulary: int) -> list[list[int]]:
        return [[random.randrange(vocabulary) for _ in range(self.context)] for _ in range(self.rows)]


@dataclass
class Clock:
    """Times of a run's ticks, and the CPU time of other processes in the timed part.

    first: number of the tick at which the timed part begins; -1: now.
    """

    first: int
    stamps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.first < 0:
            self.begin()

    def begin(self) -> None:
        self.busy = others_seconds()
        self.began = time.perf_counter()

    def tick(self) -> None:
        self.stamps.append(time.perf_counter())
        if len(self.stamps) == self.first + 1:
            self.begin()

    def end(self) -> tuple[float, float]:
        """Return the seconds of the timed part, and the cores that other processes used in it."""
        others, elapsed = others_seconds() - self.busy, time.perf_counter() - self.began
        return self.stamps[-1] - self.began, max(others, 0.0) / elapsed


def others_seconds() -> float:
    """Return the CPU seconds since boot of all processes except this one and its descendants.

    Time stolen by the host of a virtual machine is included.
    """
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    parents, used = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The command's name, in parentheses, may contain spaces.
                parts = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)], used[int(folder.name)] = int(parts[1]), sum(map(int, parts[11:15]))
    own = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in own} - own:
        own |= more
    return (user + nice + system + irq + soft + steal - sum(used[number] for number in own)) / _TICKS


def wait_for_quiet() -> None:
    """Wait until other processes are idle for a moment, at most WAIT_SECONDS."""
    until = time.perf_counter() + WAIT_SECONDS
    while time.perf_counter() < until:
        before, began = others_seconds(), time.perf_counter()
        time.sleep(0.3)
        if others_seconds() - before < QUIET * (time.perf_counter() - began):
            return


class Contestant(ABC):
    """Subject of the measures; one per process, made from the command line.

    weight_bytes: bytes of the weights; 0 if unknown.
    """

    name: str
    version: str
    weight_bytes: int = 0

    @abstractmethod
    def sample(self, measure: Measure, prompts: list[list[int]], tokens: int) -> Sample: ...


class Generator(Contestant):
    """Contestant that generates tokens."""

    @abstractmethod
    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        """Continue the prompts, all of one length, as one batch. Call `tick` when every row has its first new token,
        and after each of `steps` steps that give each row one token."""

    def sample(self, measure: Measure, prompts: list[list[int]], tokens: int) -> Sample:
        clock = Clock(WARM_UP if measure.decode else -1)
        self.run(prompts, WARM_UP + tokens if measure.decode else 0, clock.tick)
        seconds, others = clock.end()
        return {"value": (measure.rows * tokens if measure.decode else measure.context) / seconds, "others": others}


def main(make: Callable[[argparse.Namespace], Contestant],
         prepare: Callable[[argparse.Namespace], None] = lambda _: None) -> None:
    """Run a contestant's script. prepare: called first, for example to set the environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--tokens", type=int, default=32, help="timed decode steps (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=8448, help="maximum tokens of a row (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, help="upper bound of random ids (default: that of MODEL/config.json)")
    parser.add_argument("--serve", action="store_true", help="read measures from stdin")
    args = parser.parse_args()
    prepare(args)
    # Output of libraries must not mix with the JSON lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    contestant = make(args)
    who = {"name": contestant.name, "version": contestant.version,
           "load_seconds": round(time.perf_counter() - began, 1), "weight_bytes": contestant.weight_bytes}
    warm: set[Measure] = set()

    def ask(measure: Measure, prompts: list[list[int]]) -> Sample:
        if measure not in warm:
            contestant.sample(measure, prompts, WARM_UP)
            warm.add(measure)
        tries: list[Sample] = []
        while not tries or (tries[-1]["others"] > QUIET and len(tries) < TRIES):
            wait_for_quiet()
            tries.append(contestant.sample(measure, prompts, args.tokens))
        best = min(tries, key=lambda one: one["others"])
        return {name: round(number, 3) for name, number in best.items()} | {"tries": len(tries)}

    if args.serve:
        print(json.dumps(who), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(ask(Measure.parse(request["measure"]), request["prompts"])), file=answers)
        return
    size = args.vocabulary or json.loads((args.model / "config.json").read_text())["vocab_size"]
    for name in args.measures.split(","):
        measure = Measure.parse(name)
        samples = [ask(measure, measure.random_prompts(size)) for _ in range(args.repeats)]
        value = statistics.median(sample["value"] for sample in samples)
        print(json.dumps(who | {"measure": name, "value": value, "samples": samples}), file=answers)
