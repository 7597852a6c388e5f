"""One rank of a group, as a process: python -m tests.npu.rank JOB, a JSON object with the fields of `Job`.

It answers requests by a scheduler of its own, which decides the same on each rank, and prints a `Report` as JSON.
`reports` runs a group.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

COLLECTIVES = ("all_reduce", "all_gather", "linear_argmax_shard")
"""Kernels with one collective."""

PROMPTS = [[5, 9, 17, 3, 88, 41], [7], list(range(3, 40)), [61, 60, 59]]
TOKENS = 12

Answers = list[tuple[list[int], list[float], list[float]]]
"""Token ids, their log-probabilities, and those of the prompt, for each request."""


class Job(msgspec.Struct):
    """Work of a rank.

    folder: of the model.
    rank, size: see Group.
    store: file in which the ranks meet.
    memory: descriptor of the shared memory; -1 for none.
    settings: of `load_runner`.
    prompts, sampling: of the requests, each of `tokens` tokens.
    counts: report the steps.
    """

    folder: str
    rank: int
    size: int
    store: str
    memory: int
    settings: dict[str, Any]
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    tokens: int
    counts: bool = False


class StepReport(msgspec.Struct):
    """Step of a rank.

    captured: as in `StepResult`.
    gathers: collectives of torch.distributed during the launch.
    kernels: calls of COLLECTIVES, if the kernels were timed.
    """

    captured: bool
    gathers: int
    kernels: int


class Report(msgspec.Struct):
    answers: Answers
    steps: list[StepReport]


def reports(
    folder: Path, size: int, sampling: list[dict[str, Any]], *, shared: bool = True, tokens: int = TOKENS,
    counts: bool = False, **settings: Any,
) -> Report:
    """Return the report of rank 0, which must equal those of the other ranks. shared: the ranks share memory."""
    memory = os.memfd_create("ranks") if shared else -1
    store = folder / f"store-{size}-{shared}"
    store.unlink(missing_ok=True)
    defaults = {"backend": "cpu", "block_size": 16, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "threads": 1,
                "max_num_batched_tokens": 16, "dtype": "float32"}
    processes = []
    for rank in range(size):
        job = Job(str(folder), rank, size, str(store), memory, {**defaults, **settings}, PROMPTS, sampling, tokens,
                  counts)
        processes.append(subprocess.Popen(
            [sys.executable, "-m", "tests.npu.rank", msgspec.json.encode(job).decode()], stdout=subprocess.PIPE,
            pass_fds=[memory] if shared else [], env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}))
    printed = [process.communicate(timeout=400)[0] for process in processes]
    assert not any(process.returncode for process in processes)
    if shared:
        os.close(memory)
    assert len(set(printed)) == 1
    return msgspec.json.decode(printed[0], type=Report)


class Counted:
    """Runner that reports its steps. gathers, kernels: increased by each collective of a kind."""

    def __init__(self, runner: Any):
        self.steps: list[StepReport] = []
        self.gathers = self.kernels = 0
        self._runner, self._launched = runner, deque[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: Any) -> Any:
        self.gathers = 0
        handle = self._runner.launch(step)
        self._launched.append(self.gathers)
        return handle

    def collect(self, handle: Any) -> Any:
        self.kernels = 0
        result = self._runner.collect(handle)
        self.steps.append(StepReport(result.captured, self._launched.popleft(), self.kernels))
        return result


def main(job: Job) -> None:
    import torch.distributed as dist

    from npuserve.npu import parallel
    from npuserve.npu.execution.load import load_runner
    from npuserve.npu.step import SamplingParams
    from tests.support.loop import Ask, serve

    counted = Counted(None)

    def observe(kernel: str, *_: object) -> None:
        counted.kernels += kernel in COLLECTIVES

    def gather(*arguments: Any) -> Any:
        counted.gathers += 1
        return gather_tensors(*arguments)

    gather_tensors, parallel._gather = parallel._gather, gather
    group = (parallel.Group(job.rank, job.size, dist.FileStore(job.store, job.size), job.memory)
             if job.size > 1 else None)
    runner: Any = load_runner(
        job.folder, **job.settings, group=group, progress=lambda done, total: None, observe=observe)
    if job.counts:
        counted._runner = runner
        runner = counted
    asks = [Ask(0, None, {"prompt_ids": prompt, "max_tokens": job.tokens, "sampling": SamplingParams(**sampling)})
            for prompt, sampling in zip(job.prompts, job.sampling, strict=True)]
    answers, _ = serve(runner, asks, depth=2, pool=runner.num_blocks, seats=4, budget=16)
    print(msgspec.json.encode(Report([
        (a.tokens, [one.logprob for one in a.logprobs], [one.logprob for one in a.prompt_logprobs])
        for a in answers], counted.steps)).decode())
    sys.stdout.flush()
    os._exit(0)  # a rank that ends later must not fail by the end of the group


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
