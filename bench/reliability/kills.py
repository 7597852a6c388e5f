"""Streams during SIGKILLs of the engine: completeness, and length of the pauses.

    python bench/reliability/kills.py [MODEL] [--kills 20] [--streams 64] [--gap 0.1,3] [--seed 1] [--json FILE]
        [--ranks] [-- FLAGS]

Each of the mixed requests is first answered undisturbed. Then all run concurrently, again and again, while the engine
is killed at random moments, also while it loads. Every stream must be complete and equal to the undisturbed one: text,
ids, log-probabilities, finish, offsets. Exit code 1 otherwise. Prints how long running streams paused, and how long
engine starts took. FLAGS are settings of the server. The kernels must be deterministic: see docs/architecture.md.
"""

from __future__ import annotations

import argparse
import bisect
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import arguments, engine_of, ranks_of, report, serving

STORIES = (
    "Once upon a time", "One day, a little girl named Lily", "The cat and the dog", "Tim wanted a new toy. He",
    "There was a big red ball in the park.", "It was a dark night and the moon", "从前有一只小猫", "😀 é 中文")
SHARED = " ".join(STORIES[:6]) * 3


def asks(count: int, tokens: int, seed: int = 1) -> list[pb.GenerateRequest]:
    """Return varied requests: greedy and seeded, with shared and own prefixes, penalties, stop strings,
    log-probabilities, minimum lengths, and characters of several tokens."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        one = pb.GenerateRequest(text=(SHARED if number % 3 == 0 else "") + STORIES[number % len(STORIES)])
        one.output.return_token_ids = True
        one.stopping.max_tokens = chance.randint(tokens // 2, tokens)
        one.stopping.ignore_eos = number % 5 != 4
        one.sampling.temperature = 0.0
        if number % 2:
            one.sampling.temperature, one.sampling.seed = chance.choice([0.7, 1.0, 1.5, 100.0]), number
            one.sampling.top_p = chance.choice([0.9, 1.0])
        if number % 4 == 1:
            one.sampling.repetition_penalty, one.sampling.frequency_penalty = 1.2, 0.4
        if number % 4 == 2:
            one.output.logprobs, one.output.prompt_logprobs = 2, 1
        if number % 8 == 3:
            # Ids of single bytes in the built-in model's tokenizer: broken and whole characters.
            one.sampling.allowed_token_ids.extend(range(3, 259))
        if number % 8 == 5:
            one.stopping.stop.extend([" the end of", "Lily", "\n"])
            one.stopping.min_tokens = tokens // 3
            one.stopping.include_stop = number % 16 == 5
        made.append(one)
    return made


BUFFERED = 0.25
"""Seconds for which messages sent before the engine's death may still arrive."""


@dataclass
class Answer:
    """Received part of a stream. times: arrival time of each message."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    reports: list[pb.PositionLogprobs] = field(default_factory=list)
    prompt_reports: list[pb.PositionLogprobs] = field(default_factory=list)
    finish: pb.Finish | None = None
    times: list[float] = field(default_factory=list)

    def add(self, part: pb.StreamGenerateResponse) -> None:
        """Append a message. Raises AssertionError if it does not continue the stream."""
        assert self.finish is None, "a message after the finish"
        assert part.offset == len(self.ids), f"offset {part.offset} after {len(self.ids)} tokens"
        assert part.num_tokens == len(part.token_ids), f"{part.num_tokens} tokens are {len(part.token_ids)}"
        self.text += part.text
        self.ids += part.token_ids
        self.reports += part.logprobs
        self.prompt_reports += part.prompt_logprobs
        self.finish = part.finish if part.HasField("finish") else None
        self.times.append(time.monotonic())

    def same(self, other: Answer) -> bool:
        """Return True if both are complete and equal, except for times and the number of cached prompt tokens."""
        mine, its = (pb.Finish() if one.finish is None else one.finish for one in (self, other))
        return (self.finish is not None and (self.text, self.ids) == (other.text, other.ids)
                and (self.reports, self.prompt_reports) == (other.reports, other.prompt_reports)
                and (mine.reason, mine.matched_stop, mine.usage.prompt_tokens, mine.usage.generated_tokens)
                == (its.reason, its.matched_stop, its.usage.prompt_tokens, its.usage.generated_tokens))


def stream(stub: rpc.InferenceServiceStub, ask: pb.GenerateRequest) -> Answer:
    """Send the request and return its whole answer."""
    return read(stub.StreamGenerate(ask, timeout=600))


def read(parts: Iterable[pb.StreamGenerateResponse]) -> Answer:
    """Return the whole answer that a stream carries. Raises AssertionError if the stream has no finish."""
    answer = Answer()
    for part in parts:
        answer.add(part)
    assert answer.finish is not None, "a stream without a finish"
    return answer


class Killer:
    """Thread function that kills a server's engine.

    target: host:port.
    pid: process id of the supervisor.
    kills: number of kills.
    ranks: True to kill the engine and the other ranks of its group in turn.
    gaps: least and most seconds from readiness to a kill. Every fourth gap begins at the last kill, while the engine
        may still load.
    killed: times of the kills.
    """

    def __init__(self, target: str, pid: int, kills: int, gaps: tuple[float, float], seed: int,
                 ranks: bool = False) -> None:
        self.killed: list[float] = []
        self.over = False
        self._target, self._pid, self._kills, self._gaps = target, pid, kills, gaps
        self._chance = random.Random(seed)
        self._ranks = ranks

    def run(self) -> None:
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            self._run(health_pb2_grpc.HealthStub(channel))

    def _run(self, health: health_pb2_grpc.HealthStub) -> None:
        last = 0
        for number in range(self._kills):
            while (found := engine_of(self._pid)) in (0, last) or (number % 4 != 3 and not serves(health)):
                time.sleep(0.02)
            time.sleep(self._chance.uniform(*self._gaps))
            group = [found, *(ranks_of(self._pid) if self._ranks else [])]
            os.kill(group[number % len(group)], signal.SIGKILL)
            self.killed.append(time.monotonic())
            last = found
        self.over = True


def serves(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def disturbed(target: str, killer: Killer, wanted: Sequence[pb.GenerateRequest], alone: Sequence[Answer],
              ) -> tuple[list[str], list[Answer]]:
    """Run all requests concurrently and repeatedly until the last kill; return (errors, answers)."""
    wrong: list[str] = []
    answers: list[Answer] = []

    def client(number: int) -> None:
        with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = rpc.InferenceServiceStub(channel)
            while True:
                last = killer.over
                try:
                    answer = stream(stub, wanted[number])
                except grpc.RpcError as error:
                    # Refused: there was no engine. Every accepted stream must be complete.
                    if error.code() is grpc.StatusCode.UNAVAILABLE and "restarting" in (error.details() or ""):
                        time.sleep(0.05)
                        continue
                    wrong.append(f"stream {number}: {error.code()} {error.details()}")
                    return
                except AssertionError as error:
                    wrong.append(f"stream {number}: {error}")
                    return
                answers.append(answer)
                if not answer.same(alone[number]):
                    wrong.append(f"stream {number} differs: {answer.text!r} {alone[number].text!r}")
                if last:
                    return

    with ThreadPoolExecutor(len(wanted) + 1) as threads:
        killing = threads.submit(killer.run)
        for one in [threads.submit(client, number) for number in range(len(wanted))]:
            one.result()
        killing.result()
    return wrong, answers


def pauses(killed: Sequence[float], answers: Sequence[Answer]) -> list[float]:
    """Return the longest gap, in seconds, of each stream that ran at a kill. Only gaps that began at most BUFFERED
    after the kill and before the next one count."""
    found = []
    for answer in answers:
        for kill, after in zip(killed, [*killed[1:], float("inf")], strict=True):
            begin = bisect.bisect(answer.times, kill)
            end = bisect.bisect(answer.times, min(kill + BUFFERED, after))
            silences = [later - last for last, later in pairwise(answer.times[max(begin - 1, 0) : end + 1])]
            if begin > 0 and silences and answer.times[begin] < after:
                found.append(max(silences))
    return sorted(found)


def measure(args: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    wanted = asks(args.streams, args.tokens, args.seed)
    low, high = map(float, args.gap.split(","))
    with serving(args.model, flags) as server:
        with grpc.insecure_channel(server.target) as channel:
            stub = rpc.InferenceServiceStub(channel)
            with ThreadPoolExecutor(8) as threads:
                alone = list(threads.map(lambda ask: stream(stub, ask), wanted))
        killer = Killer(server.target, server.pid, args.kills, (low, high), args.seed, args.ranks)
        began = time.monotonic()
        wrong, answers = disturbed(server.target, killer, wanted, alone)
        seconds = time.monotonic() - began
        said = server.log
    found = pauses(killer.killed, answers)
    starts = sorted(float(at) for at in re.findall(r"ready in [\d.]+ s\W.*?seconds\W+([\d.]+)", said))

    def share(of: float) -> float | None:
        return round(found[min(int(of * len(found)), len(found) - 1)], 4) if found else None

    return {
        "kills": len(killer.killed), "streams": args.streams, "answers": len(answers),
        "tokens": sum(len(answer.ids) for answer in answers), "seconds": round(seconds, 1), "wrong": wrong,
        "paused_streams": len(found), "pause_seconds": {
            "p50": share(0.5), "p90": share(0.9), "p99": share(0.99), "longest": share(1.0)},
        "engine_start_seconds": {"shortest": starts[0], "longest": starts[-1]} if starts else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the longest answers")
    parser.add_argument("--gap", default="0.1,3", help="least and most seconds that an engine serves")
    parser.add_argument("--ranks", action="store_true", help="kill the engine and the other ranks in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args, flags = arguments(parser)
    result = measure(args, flags)
    report(result, args.json)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
