"""Embeddings a second of npuserve's server, in turn with sentence-transformers and OpenVINO.

    python bench/peers/embeddings.py MODEL --peer sentence-transformers=PYTHON [--peer openvino=PYTHON] [-- SETTINGS]

MODEL is a folder of an embedding model. Each PYTHON is the interpreter of an environment with the peer: of
sentence-transformers, or of optimum-intel and openvino. All are loaded at the same time and take turns, in an order
that rotates: in each round all embed the same new texts. npuserve's texts come over gRPC, one text a call, --calls at a
time.

A peer is this program in the peer's environment, `embeddings.py --as NAME MODEL THREADS DTYPE`: it prints one line once
the model is loaded. Then each line of stdin is a JSON list of texts, for which it prints both seconds and the first
text's embedding. Texts of similar length are in one batch, so that little is padding.

Prints texts a second of each in each round, their medians, npuserve's ratio to the best peer as the median over the
rounds, the processor seconds of a text (npuserve's with those of its client), and the largest difference of an
embedding's value. --dtype is that of all. On a busy machine the processor seconds say more than the texts a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Embed = Callable[[list[str]], tuple[float, float, list[float]]]
"""Embeds texts; returns the seconds, the processor seconds and the first text's embedding."""
BATCH = 32


def sentence_transformers(model: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: loaded.encode(texts, batch_size=BATCH, show_progress_bar=False)


def openvino(model: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import numpy as np
    from optimum.intel import OVModelForFeatureExtraction
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    loaded = OVModelForFeatureExtraction.from_pretrained(
        model, export=True, ov_config={"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads})

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[Any] = [None] * len(texts)
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            inputs = tokenizer([texts[index] for index in batch], padding=True, return_tensors="np")
            last = np.asarray(loaded(**inputs).last_hidden_state)[:, -1]
            for index, row in zip(batch, last, strict=True):
                found[index] = row / np.linalg.norm(row)
        return found

    return embed


class Peer:
    """Process of a peer."""

    def __init__(self, name: str, python: str, args: argparse.Namespace):
        here = Path(__file__).absolute()
        command = [python, str(here), "--as", name, os.path.abspath(args.model), str(args.threads), args.dtype]
        # This folder as working directory: a peer's optional import must not find a folder of this repository.
        self.process = subprocess.Popen(
            command, cwd=here.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True)
        while (line := self._line()) != "ready\n":
            if not line:
                raise SystemExit(f"{name} does not start; run: {' '.join(command)}")

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def __call__(self, texts: list[str]) -> tuple[float, float, list[float]]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(texts) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._line())
        return answer["seconds"], answer["cpu"], answer["first"]


def cpu_seconds(processes: list[int]) -> float:
    """Return the processor time that the processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def words() -> list[str]:
    """Return the words of the project's documents."""
    return [word for path in sorted((ROOT / "docs").glob("*.md")) for word in path.read_text(encoding="utf-8").split()]


def serve_as(peer: str, model: str, threads: str, dtype: str) -> None:
    """Embed what stdin has, as a peer."""
    embed = {"sentence-transformers": sentence_transformers, "openvino": openvino}[peer](model, int(threads), dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        found = embed(texts)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu, "first": [float(value) for value in found[0]]}), flush=True)



def main() -> None:
    if sys.argv[1:2] == ["--as"]:
        serve_as(*sys.argv[2:])
        return
    sys.path.insert(0, str(ROOT))  # not for peers, whose packages may have the names of our folders
    from bench.serving.server import arguments, serving
    from npuserve.client import Client

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

        def npuserve(texts: list[str]) -> tuple[float, float, list[float]]:
            began, cpu = time.perf_counter(), cpu_seconds([os.getpid(), *server.processes.values()])
            found = list(threads.map(lambda text: client.embed(text).values, texts))
            seconds = time.perf_counter() - began
            return seconds, cpu_seconds([os.getpid(), *server.processes.values()]) - cpu, list(found[0])

        _compare({"npuserve": npuserve, **peers}, args)


def _compare(contestants: dict[str, Embed], args: argparse.Namespace) -> None:
    """Run the rounds, the first of which does not count, and print the results."""
    source, random_words = random.Random(1), words()
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    cpus: dict[str, list[float]] = {name: [] for name in contestants}
    difference = 0.0
    order = list(contestants)
    for number in range(args.rounds + 1):
        texts = [" ".join(source.choices(random_words, k=source.randint(1, args.words))) for _ in range(args.texts)]
        first = {}
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds, cpu, first[name] = contestants[name](texts)
            if number:
                speeds[name].append(len(texts) / seconds)
                cpus[name].append(cpu / len(texts))
        difference = max([difference, *(abs(a - b) for vector in first.values()
                                        for a, b in zip(vector, first["npuserve"], strict=True))])
        if number:
            speed = {name: round(speeds[name][-1], 2) for name in contestants}
            print(json.dumps({"round": number, **speed}), flush=True)
    ratios = [ours / max(speeds[name][number] for name in contestants if name != "npuserve")
              for number, ours in enumerate(speeds["npuserve"])] if len(contestants) > 1 else []
    print(json.dumps({
        "texts_per_second": {name: round(statistics.median(values), 2) for name, values in speeds.items()},
        "cpu_seconds_per_text": {name: round(statistics.median(values), 4) for name, values in cpus.items()},
        "ratio_to_best": round(statistics.median(ratios), 2) if ratios else None,
        "ratios": [round(ratio, 2) for ratio in sorted(ratios)], "largest_difference": difference}))


if __name__ == "__main__":
    main()
