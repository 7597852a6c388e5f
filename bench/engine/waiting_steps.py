"""Time in which the device waits for the host between two steps, where drafts need the tokens of the step before.

    python bench/engine/waiting_steps.py [--streams 1,8,32] [--step-ms 3] [--depth 3] [--tokens 600] [--rounds 3]

The engine's loop, scheduler and socket are the real ones. The front end, another process, only reads. The runner
computes nothing: a step takes a chosen time, and about four of five drafts are right. Measured is the time from the end
of `collect` to the next `launch`, without either: host_cost.py has `launch`. `launch first` is the engine as it is;
`output first` sends a step's output, and reads messages, before it launches the next step. Rounds in turn. Medians are
of the steps, and their range is that of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from npuserve.npu.step import Step, StepResult
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.speculation.speculator import Speculator

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from tests.service.engine.test_loop import MODEL, Peer
from tests.support.counting_runner import FakeRunner

BLOCK_SIZE = 16
PROMPT = 40
WARM_UP = 20
EPOCH = 7
"""Run of the engine that the front end of the tests expects."""


class DraftingRunner(FakeRunner):
    """Runner that drafts. gaps: seconds without a step in flight before each launch."""

    def __init__(self, seconds: float) -> None:
        super().__init__(delay=seconds, block_size=BLOCK_SIZE)
        self.gaps: list[float] = []
        self._collected = 0.0

    def launch(self, step: Step) -> tuple[StepResult, float]:
        if self._collected and not self._flying:
            self.gaps.append(time.perf_counter() - self._collected)
        result, end = super().launch(step)
        for row in step.rows:
            last = self._known[row.request_id].tokens[-1]
            result.drafts[row.request_id] = [
                (last + 1 + number) % self.vocabulary if (last + number) % 5 else 0 for number in range(row.predicts)]
        return result, end

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        result = super().collect(handle)
        self._collected = time.perf_counter()
        return result


class OutputFirst(Engine):
    """Engine that launches no step before the output of the last one is sent."""

    def _launches_before_output(self, progress: Any) -> bool:
        return False


def read_answers(address: str, streams: int, tokens: int) -> None:
    """Ask for answers, and read them."""
    peer = Peer(address)
    for key in range(streams):
        peer.submit(key, [key + 5] * PROMPT, tokens)
    peer.until_end(*range(streams))


def gaps_of(engine_class: type[Engine], streams: int, args: argparse.Namespace) -> list[float]:
    """Return the seconds between the steps of a run."""
    runner = DraftingRunner(args.step_ms / 1000)
    blocks = BlockManager(streams * (-(-(PROMPT + args.tokens + args.depth) // BLOCK_SIZE) + 1), BLOCK_SIZE)
    drafting = Drafting(Speculator("mtp", recomputes=False, depth=args.depth), streams * args.depth)
    scheduler = Scheduler(blocks, max_num_seqs=streams, max_num_batched_tokens=512, max_queue=0, aging_seconds=10.0,
                          drafting=drafting)
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/engine"
        engine = engine_class(scheduler, runner, EngineSocket(address), MODEL, EPOCH)
        if not (front_end := os.fork()):
            read_answers(address, streams, args.tokens)
            os._exit(0)

        def wait() -> None:
            os.waitpid(front_end, 0)
            engine.stop()

        threading.Thread(target=wait, daemon=True).start()
        engine.run()
    return runner.gaps[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--streams", default="1,8,32", help="running requests (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=3.0, help="time of a step (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=3, help="drafts of a row (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    args = parser.parse_args()
    print(f"{'streams':>8}{'us between steps':>20}{'median':>8}  range of the rounds' medians")
    for streams in map(int, args.streams.split(",")):
        medians: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, engine_class in (("output first", OutputFirst), ("launch first", Engine)):
                gaps = gaps_of(engine_class, streams, args)
                medians.setdefault(name, []).append(1e6 * statistics.median(gaps))
        for name, each in medians.items():
            print(f"{streams:>8}{name:>20}{statistics.median(each):>8.0f}  {min(each):.0f} to {max(each):.0f}",
                  flush=True)


if __name__ == "__main__":
    main()
