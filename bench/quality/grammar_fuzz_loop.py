"""Random and hostile constraints in a running engine: streams without a constraint continue meanwhile.

    python bench/quality/grammar_fuzz_loop.py [FOLDER] [--cases 3000] [--seed 0] [--seconds 600] [--streams 8]
        [--constrained 8]

The engine's loop, scheduler, compiler and matchers are real and run in a process of their own. Its runner computes
nothing: a step takes 2 ms, and a token is chosen at random from its mask. `--streams` streams without a constraint run
all the time, and beside them `--constrained` requests with the constraints of grammar_fuzz.py. FOLDER: of a model,
whose tokenizer is used (default: a vocabulary of bytes and a few longer tokens).

Each constraint must be accepted or refused, each accepted request must end once, and complete answers must be valid by
`jsonschema`, `re` or comparison. An accepted one may exceed the limits of a step later: which tokens are drawn depends
on the order in which steps and constraints meet. Exits with 1 otherwise. Reported are counts, and in milliseconds:

    loop_cpu          most processor time of the loop's thread in one iteration.
    gap               longest time between two steps that have tokens of the streams; a step is 2 ms of it. Time without
                      a stream is not counted: all of them may end while the client checks an answer.
    gap_runnable      the same without the time for which the loop's thread was ready to run and had no processor.
    answer            longest time until a constraint was accepted or refused, on which the load of the machine counts.

`loop_cpu` and `gap_runnable` are for noisy machines. The constraints that were live in the worst iteration are named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.quality.grammar_fuzz import Cases, judged
from npuserve.npu.step import SamplingParams, StepResult
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import framing
from npuserve.service.ipc import messages as m
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.processes.child import Heartbeat
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.structured_output.compiler import GrammarCompiler
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.manager import BuiltCompiler
from npuserve.service.structured_output.vocabulary import Vocabulary
from npuserve.service.text.model_folder import open_folder
from tests.support.counting_runner import FakeRunner
from tests.support.grammars import vocabulary

STEP_SECONDS = 0.002
STREAM_TOKENS, ANSWER_TOKENS = 400, 80
WARM_UP = Constraint("regex", "a")
STRUCTURAL = b'"}],:01\n'
"""Characters that half of the tokens are chosen from where they are allowed, so that answers end."""


# The engine


class Worst:
    """Longest times of the loop, in seconds, and the constraints that were live then."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.reset()

    def reset(self) -> None:
        self.seconds = {"loop_cpu": 0.0, "gap": 0.0, "gap_runnable": 0.0}
        self.constraints: dict[str, list[str]] = {}
        self._cpu = -1.0
        self._step: tuple[float, float] | None = None

    def beat(self) -> None:
        """Note an iteration of the loop."""
        if self.engine and all(sequence.request.constraint for sequence in self.engine.registry.live.values()):
            self._step = None  # no stream
        now = time.thread_time()
        if self._cpu >= 0:
            self._note("loop_cpu", now - self._cpu)
        self._cpu = time.thread_time()

    def step(self) -> None:
        """Note a step with tokens of streams without a constraint."""
        now, waited = time.perf_counter(), _run_queue_seconds()
        if self._step is not None:
            gap, in_queue = now - self._step[0], waited - self._step[1]
            self._note("gap", gap)
            self._note("gap_runnable", gap - in_queue)
        self._step = now, waited

    def _note(self, name: str, seconds: float) -> None:
        if seconds > self.seconds[name] and self.engine is not None:
            self.seconds[name] = seconds
            live = [sequence.request.constraint for sequence in self.engine.registry.live.values()]
            self.constraints[name] = [f"{one.kind} {one.text[:100]}" for one in live if one][:8]


class Pulse(Heartbeat):
    """Heartbeat that notes each iteration of the loop and sends nothing."""

    def __init__(self, worst: Worst):
        super().__init__(is_enabled=False)
        self._worst = worst

    def beat(self) -> None:
        self._worst.beat()


def _run_queue_seconds() -> float:
    """Return the time for which this thread was ready to run and did not."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class RandomRunner(FakeRunner):
    """Runner that chooses tokens at random from their masks. words: [words of a mask] of tokens that end texts."""

    def __init__(self, size: int, worst: Worst, closing: npt.NDArray[np.int32]):
        super().__init__(size, STEP_SECONDS, 16)
        self._worst, self._closing = worst, closing
        self._random = random.Random(0)

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        result = super().collect(handle)
        if any(key in result.token_ids and self._is_stream(key) for key in self._known):
            self._worst.step()
        return result

    def _is_stream(self, key: int) -> bool:
        return self._known[key].request.sampling.seed == 0

    def _sample(self, request_id: int, result: StepResult, mask: npt.NDArray[np.int32] | None = None) -> None:
        if mask is None:
            super()._sample(request_id, result)
            return
        closing = mask & self._closing
        chosen = closing if closing.any() and self._random.random() < 0.5 else mask
        words = np.flatnonzero(chosen)
        word = int(words[self._random.randrange(len(words))])
        bits = [bit for bit in range(32) if int(chosen[word]) >> bit & 1]
        token = 32 * word + self._random.choice(bits)
        self._known[request_id].tokens.append(token)
        result.token_ids[request_id] = [token]


def built(folder: str) -> Vocabulary:
    """Return the vocabulary of the tokenizer in `folder`; with "", the vocabulary of bytes that tests use."""
    if not folder:
        return vocabulary()
    found = open_folder(Path(folder), folder, "")
    assert found.tokenizer
    size = max(len(found.tokenizer.token_bytes() or ()), max(found.eos_token_ids) + 1)
    return Vocabulary.from_tokenizer(found.tokenizer, size, found.eos_token_ids)


def serve(address: str, folder: str) -> None:
    """Run the engine until SIGTERM, and print its figures. SIGUSR1 begins a new measurement."""
    words, worst = built(folder), Worst()
    closing = np.zeros(-(-words.size // 32), np.uint32)
    for token_id, text in enumerate(words.data.tokens):
        if token_id in words.end_ids or (len(text) == 1 and text in STRUCTURAL):
            closing[token_id // 32] |= np.uint32(1 << token_id % 32)
    scheduler = Scheduler(BlockManager(4096, 16), max_num_seqs=64, max_num_batched_tokens=512, max_queue=256,
                          aging_seconds=10, min_forced=2)
    info = m.ModelInfo("Fake", words.size, 4096, "float32", "none", "float32", "cpu", 64, 256, 4096 * 16, 0, True)
    engine = Engine(
        scheduler, RandomRunner(words.size, worst, closing.view(np.int32)), EngineSocket(address), info, 7,  # type: ignore[arg-type]
        heartbeat=Pulse(worst),
        build_compiler=lambda done: BuiltCompiler(GrammarCompiler(words, on_done=done), words.end_ids))
    worst.engine = engine

    def on_signal(number: int, frame: FrameType | None) -> None:
        worst.reset() if number == signal.SIGUSR1 else engine.stop()

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, on_signal)
    gc.freeze()  # as the engine's process does: a collection of all objects takes 100 ms
    print("ready", flush=True)
    engine.run()
    scheduler.check_integrity()
    engine.structured_output.close()
    print(json.dumps({"milliseconds": {name: round(1e3 * value, 2) for name, value in worst.seconds.items()},
                      "constraints": worst.constraints}))


# The client


class Asked(NamedTuple):
    """A constrained request. began: time.monotonic() when it was sent."""

    kind: str
    value: Any
    text: str
    began: float


class Found(NamedTuple):
    """Result of a run. milliseconds, constraints: see the head of this file."""

    counts: Counter[str]
    failures: list[str]
    milliseconds: dict[str, float]
    constraints: dict[str, list[str]]


class FuzzClient:
    """Front end of the engine, which keeps streams and constrained requests running."""

    def __init__(self, address: str, tokens: list[bytes], end_ids: frozenset[int], rng: random.Random):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(120)
        self._socket.connect(address)
        self._splitter = framing.Splitter()
        self._tokens, self._end_ids, self._rng = tokens, end_ids, rng
        self._key = 0
        self._streams: set[int] = set()
        self._live: dict[int, Asked] = {}
        self._accepted: set[int] = set()
        self._output: dict[int, list[int]] = {}
        self.counts, self.failures, self.longest, self.slowest = Counter[str](), list[str](), 0.0, list[str]()
        self._send(m.Hello())

    def warm_up(self) -> None:
        """Wait until the compiler has started."""
        self._submit(WARM_UP, 4)
        while not any(message.outputs for message in self._receive() if isinstance(message, m.Outputs)):
            pass

    def run(self, cases: Iterator[tuple[str, Any]], streams: int, constrained: int) -> None:
        """Run until all cases have ended."""
        is_last = False
        while not (is_last and not self._live):
            while len(self._streams) < streams:
                self._streams.add(self._submit(None, STREAM_TOKENS))
            while len(self._live) < constrained and not is_last:
                is_last = (case := next(cases, None)) is None
                if case is not None:
                    kind, value = case
                    text = value if isinstance(value, str) else json.dumps(value)
                    self.counts["cases"] += 1
                    key = self._submit(Constraint(kind, text), ANSWER_TOKENS)  # type: ignore[arg-type]
                    self._live[key] = Asked(kind, value, text, time.monotonic())
            for message in self._receive():
                if isinstance(message, m.Outputs):
                    self._take(message)

    def _take(self, message: m.Outputs) -> None:
        for key in message.accepted:
            if key in self._live:
                self._answered(key)
                self._accepted.add(key)
        for output in message.outputs:
            if output.key in self._streams:
                if output.error:
                    self.failures.append(f"a stream ended with {output.error}")
                if output.error or output.finish:
                    self._streams.remove(output.key)
                    self.counts["streams ended"] += 1
            elif output.key in self._live:
                self._output.setdefault(output.key, []).extend(output.token_ids)
                if output.error or output.finish:
                    self._end(output)
            elif output.finish or output.error:
                self.counts["warm-up"] += 1

    def _answered(self, key: int) -> None:
        asked = self._live[key]
        if (seconds := time.monotonic() - asked.began) > self.longest:
            self.longest, self.slowest = seconds, [f"{asked.kind} {asked.text[:100]}"]

    def _end(self, output: m.Output) -> None:
        asked, ids = self._live[output.key], self._output.pop(output.key, [])
        name, is_accepted = f"{asked.kind} {asked.text[:400]}", output.key in self._accepted
        if not is_accepted:
            self._answered(output.key)
        self._accepted.discard(output.key)
        del self._live[output.key]
        if output.error:
            kind, text, _ = output.error
            if is_accepted and kind == "QueueFull" and "cannot be followed within limits" in text:
                self.counts["steps beyond the limits"] += 1
            elif is_accepted or kind != "InvalidField":
                self.failures.append(f"{name}: {kind}: {text}")
            else:
                self.counts["out of limits" if "must take at most" in text else "refused"] += 1
            return
        self.counts["compiled"] += 1
        assert output.finish
        if output.finish.grammar_completed and output.finish.reason != "length":
            self.counts["ended"] += 1
            answer = b"".join(self._tokens[i] for i in ids if i not in self._end_ids)
            if wrong := judged(asked.kind, asked.value, answer):
                self.failures.append(f"{name}: {wrong}: {answer!r}")

    def _submit(self, constraint: Constraint | None, max_tokens: int) -> int:
        self._key += 1
        ends = self._end_ids if constraint else frozenset()
        sampling = SamplingParams(seed=1 if constraint else 0)
        self._send(m.Submit(self._key, m.Request(
            f"r{self._key}", [self._rng.randrange(97) for _ in range(8)], max_tokens, time.monotonic(), sampling,
            eos_token_ids=ends, constraint=constraint)))
        return self._key

    def _send(self, message: m.ToEngine) -> None:
        self._socket.sendall(m.encode(message))

    def _receive(self) -> list[m.ToFrontend]:
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the engine has closed the connection")
        return [m.decode_to_frontend(message) for message in self._splitter.feed(data)]


@contextlib.contextmanager
def engine(address: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    """Run the engine's process."""
    process = subprocess.Popen([sys.executable, __file__, folder, "--engine", address], stdout=subprocess.PIPE,
                               text=True, env={**os.environ, "TRANSFORMERS_OFFLINE": "1"})
    try:
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the engine did not start")
        yield process
    finally:
        process.kill()
        process.wait()


def run(cases: int, seed: int, seconds: float, streams: int = 8, constrained: int = 8, folder: str = "") -> Found:
    """Serve `cases` constraints, or as many as begin within `seconds`."""
    rng, words = random.Random(seed), built(folder)
    made = Cases(rng)

    def drawn() -> Iterator[tuple[str, Any]]:
        end = time.monotonic() + seconds
        for _ in range(cases):
            if time.monotonic() > end:
                return
            yield made.draw()

    with tempfile.TemporaryDirectory() as place, engine(f"{place}/engine", folder) as process:
        client = FuzzClient(f"{place}/engine", words.data.tokens, words.end_ids, rng)
        client.warm_up()
        process.send_signal(signal.SIGUSR1)
        client.run(drawn(), streams, constrained)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        if process.returncode:
            client.failures.append(f"the engine ended with {process.returncode}")
    figures = json.loads(out.splitlines()[-1]) if out else {"milliseconds": {}, "constraints": {}}
    return Found(client.counts, client.failures,
                 {**figures["milliseconds"], "answer": round(1e3 * client.longest, 2)},
                 {**figures["constraints"], "answer": client.slowest})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", default="", metavar="FOLDER")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--constrained", type=int, default=8)
    parser.add_argument("--engine", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve(args.engine, args.folder)
        return 0
    found = run(args.cases, args.seed, args.seconds, args.streams, args.constrained, args.folder)
    print(dict(found.counts))
    for name, value in found.milliseconds.items():
        print(f"  {name}: {value} ms, with {found.constraints.get(name, [])}")
    for failure in found.failures:
        print("FAILED", failure)
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
