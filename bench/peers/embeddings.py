"""Embeddings a second of npuserve's server, in turn with sentence-transformers and OpenVINO.

    python bench/peers/embeddings.py MODEL --peer sentence-transformers=PYTHON [--peer openvino=PYTHON] [-- SETTINGS]

MODEL is a folder of an embedding model. Each PYTHON is the interpreter of an environment with the peer: of
sentence-transformers, or of optimum-intel and openvino. All are loaded at the same time and take turns, in an order
that rotates: in each round all embed the same new texts. npuserve's texts come over gRPC, one text a call, --calls at a
time.

Prints texts a second of each in each round, their medians, npuserve's ratio to the best peer as the median over the
rounds, and the largest difference of an embedding's value. --dtype is that of all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.serving.server import arguments, serving  # noqa: E402
from npuserve.client import Client  # noqa: E402

Embed = Callable[[list[str]], tuple[float, list[float]]]
"""Embeds texts; returns the seconds and the first text's embedding."""


class Peer:
    """Process of embeddings_peer.py."""

    def __init__(self, name: str, python: str, args: argparse.Namespace):
        script = str(Path(__file__).with_name("embeddings_peer.py"))
        self.process = subprocess.Popen(
            [python, script, name, args.model, str(args.threads), args.dtype], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while (line := self._line()) != "ready\n":
            if not line:
                raise SystemExit(f"{name} does not start; run: {python} {script} {name} {args.model} 2 {args.dtype}")

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def __call__(self, texts: list[str]) -> tuple[float, list[float]]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(texts) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._line())
        return answer["seconds"], answer["first"]


def words() -> list[str]:
    """Return the words of the project's documents."""
    return [word for path in sorted((ROOT / "docs").glob("*.md")) for word in path.read_text(encoding="utf-8").split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=64, help="texts of a round (default: %(default)s)")
    parser.add_argument("--words", type=int, default=60, help="most words of a text (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=64, help="calls at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    args, settings = arguments(parser)
    peers: dict[str, Embed] = {}
    for peer in args.peer:
        name, _, python = peer.partition("=")
        peers[name] = Peer(name, python, args)
    flags = ["--dtype", args.dtype, "--threads", str(args.threads), "--device", "cpu", *settings]
    with serving(args.model, flags) as server, Client(server.target) as client, ThreadPoolExecutor(
            args.calls) as threads:

        def npuserve(texts: list[str]) -> tuple[float, list[float]]:
            began = time.perf_counter()
            found = list(threads.map(lambda text: client.embed(text).values, texts))
            return time.perf_counter() - began, list(found[0])

        _compare({"npuserve": npuserve, **peers}, args)


def _compare(contestants: dict[str, Embed], args: argparse.Namespace) -> None:
    """Run the rounds, the first of which does not count, and print the results."""
    source, random_words = random.Random(1), words()
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    difference = 0.0
    order = list(contestants)
    for number in range(args.rounds + 1):
        texts = [" ".join(source.choices(random_words, k=source.randint(1, args.words))) for _ in range(args.texts)]
        first = {}
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds, first[name] = contestants[name](texts)
            if number:
                speeds[name].append(len(texts) / seconds)
        difference = max([difference, *(abs(a - b) for vector in first.values()
                                        for a, b in zip(vector, first["npuserve"], strict=True))])
        if number:
            speed = {name: round(speeds[name][-1], 2) for name in contestants}
            print(json.dumps({"round": number, **speed}), flush=True)
    ratios = [ours / max(speeds[name][number] for name in contestants if name != "npuserve")
              for number, ours in enumerate(speeds["npuserve"])] if len(contestants) > 1 else []
    print(json.dumps({
        "texts_per_second": {name: round(statistics.median(values), 2) for name, values in speeds.items()},
        "ratio_to_best": round(statistics.median(ratios), 2) if ratios else None,
        "ratios": [round(ratio, 2) for ratio in sorted(ratios)], "largest_difference": difference}))


if __name__ == "__main__":
    main()
