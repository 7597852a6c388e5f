"""Ranks of groups, each a process: python -m tests.npu.rank.

It reads groups from stdin, one a line: a JSON list with the fields of a `Job` for each rank. A rank is a fork of this
process, so that torch is imported once. It answers requests by a scheduler of its own, which decides the same on each
rank. A line on stdout answers a group: the JSON list of the ranks' `Report`s as strings, "" for a rank that failed.
`reports` runs a group.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

COLLECTIVES = ("all_reduce", "all_gather", "linear_argmax_shard")
"""Kernels with one collective."""

PROMPTS = [[5, 9, 17, 3, 88, 41], [7], list(range(3, 40)), [61, 60, 59]]
TOKENS = 12

Answers = list[tuple[list[int], list[float], list[float]]]
"""Token ids, their log-probabilities, and the log-probabilities of the prompt, for each request."""


class Job(msgspec.Struct):
    """Work of a rank.

    folder: folder of the model.
    rank, size: see Group.
    store: file of the store by which the ranks find each other.
    shared: the ranks share memory.
    settings: arguments of `load_runner`.

    prompts, sampling: one for each request. An answer has `tokens` tokens.
    counts: report the steps.
    divides: each rank adds a part of each sum (`collectives.divides_sum`).
    fails: steps cannot be captured.
    """

    folder: str
    rank: int
    size: int
    store: str
    shared: bool
    settings: dict[str, Any]
    prompts: list[list[int]]
    sampling: list[dict[str, Any]]
    tokens: int
    counts: bool = False
    divides: bool = False
    fails: bool = False


class StepReport(msgspec.Struct):
    """Step of a rank.

    captured: as in `StepResult`.
    gathers: collectives of torch.distributed during the launch: all-gathers and all-to-alls.
    kernels: calls of COLLECTIVES, if the kernels were timed.
    """

    captured: bool
    gathers: int
    kernels: int


class Report(msgspec.Struct):
    """Report of a rank. accepted: drafts of the model's head that were accepted."""

    answers: Answers
    steps: list[StepReport]
    accepted: int = 0


def reports(
    folder: Path, size: int, sampling: list[dict[str, Any]], *, shared: bool = True, tokens: int = TOKENS,
    counts: bool = False, divides: bool = False, of_last: dict[str, Any] | None = None, **settings: Any,
) -> Report:
    """Return the report of rank 0, which must equal the reports of the other ranks.

    shared: the ranks share memory.
    counts, divides: see `Job`.
    of_last: settings of the last rank alone, or {"fails": True}.

    Raises RuntimeError if the ranks failed.
    """
    store = folder / f"store-{size}-{shared}"
    store.unlink(missing_ok=True)
    defaults = {"backend": "cpu", "block_size": 16, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "threads": 1,
                "max_num_batched_tokens": 16, "dtype": "float32"}
    given = [{**defaults, **settings}] * (size - 1) + [{**defaults, **settings, **(of_last or {})}]
    jobs = [Job(str(folder), rank, size, str(store), shared, of_rank, PROMPTS, sampling, tokens, counts, divides,
                of_rank.pop("fails", False)) for rank, of_rank in enumerate(given)]
    process = _ranks()
    assert process.stdin
    assert process.stdout
    print(msgspec.json.encode(jobs).decode(), file=process.stdin, flush=True)
    made = msgspec.json.decode(process.stdout.readline(), type=list[str])
    assert len(made) == size
    assert len(set(made)) == 1
    if not made[0]:
        raise RuntimeError("the ranks failed")
    return msgspec.json.decode(made[0], type=Report)


@functools.cache
def _ranks() -> subprocess.Popen[str]:
    """Start the process whose forks are the ranks of one group after the other. It ends with this process."""
    return subprocess.Popen([sys.executable, "-m", "tests.npu.rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


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


def cannot_capture(*_: Any, **__: Any) -> None:
    """Stand for `Backend.capture`."""
    from npuserve.npu.backends.base import CaptureError

    raise CaptureError("no graphs here")


def answer(job: Job, memory: int) -> bytes:
    """Return the report of a rank as JSON. memory: descriptor of the shared memory; -1 for none."""
    import torch.distributed as dist

    from npuserve.kernels import collectives
    from npuserve.npu import parallel
    from npuserve.npu.backends.cpu import CpuBackend
    from npuserve.npu.execution.load import load_runner
    from npuserve.npu.step import SamplingParams
    from npuserve.service.scheduling.drafting import Drafting
    from npuserve.service.speculation.speculator import Speculator
    from tests.support.loop import Ask, serve

    counted = Counted(None)

    def observe(kernel: str, *_: object) -> None:
        counted.kernels += kernel in COLLECTIVES

    def counting(move: Any) -> Any:
        def counts(*arguments: Any) -> Any:
            counted.gathers += 1
            return move(*arguments)

        return counts

    parallel._gather, parallel._exchange = counting(parallel._gather), counting(parallel._exchange)
    if job.divides:
        collectives.MIN_SAVED_BYTES = 0
    if job.fails:
        CpuBackend.capture = cannot_capture  # type: ignore[method-assign]
    group = (parallel.Group(job.rank, job.size, dist.FileStore(job.store, job.size), memory)
             if job.size > 1 else None)
    runner: Any = load_runner(
        job.folder, **job.settings, group=group, progress=lambda done, total: None, observe=observe)
    if job.counts:
        counted._runner = runner
        runner = counted
    asks = [Ask(0, None, {"prompt_ids": prompt, "max_tokens": job.tokens, "sampling": SamplingParams(**sampling)})
            for prompt, sampling in zip(job.prompts, job.sampling, strict=True)]
    has_state = runner.num_slots > 0
    drafting = Drafting(
        Speculator("mtp", recomputes=has_state, depth=2), runner.max_drafts,
        state_block_size=runner.block_size if has_state else 0) if runner.predicts else Drafting()
    answers, _ = serve(runner, asks, depth=2, pool=runner.num_blocks, seats=4, budget=16, drafting=drafting)
    return msgspec.json.encode(Report([
        (a.tokens, [one.logprob for one in a.logprobs], [one.logprob for one in a.prompt_logprobs])
        for a in answers], counted.steps, drafting.accepted))


def fork(job: Job, memory: int) -> tuple[int, int]:
    """Start a rank; return its process id, and a descriptor from which its result can be read."""
    result, end = os.pipe()
    if not (pid := os.fork()):
        made = b""
        try:
            made = answer(job, memory)
        except BaseException:
            traceback.print_exc()
        with os.fdopen(end, "wb") as out:
            out.write(made)
        os._exit(0)  # a rank that ends later must not fail by the end of the group
    os.close(end)
    return pid, result


@functools.cache
def preload_cuda() -> None:
    """Import what ranks of emulated CUDA need, which each would import for itself."""
    from npuserve.kernels import triton
    from npuserve.npu.backends.cuda import emulated_backend  # noqa: F401

    triton.interpret()
    for file in Path(triton.__file__).parent.glob("launch_*.py"):
        if file.stem != "launch_ascend":
            importlib.import_module(f"{triton.__name__}.{file.stem}")


def main() -> None:
    import npuserve.npu.execution.load
    import npuserve.npu.parallel  # noqa: F401
    import tests.support.loop  # noqa: F401

    for line in sys.stdin:
        jobs = msgspec.json.decode(line, type=list[Job])
        if jobs[0].settings["backend"] == "cuda":
            preload_cuda()
        memory = os.memfd_create("ranks") if jobs[0].shared else -1
        results = []
        for pid, result in [fork(job, memory) for job in jobs]:
            with os.fdopen(result, "rb") as made:
                results.append(made.read().decode())
            os.waitpid(pid, 0)
        if memory >= 0:
            os.close(memory)
        print(msgspec.json.encode(results).decode(), flush=True)


if __name__ == "__main__":
    main()
