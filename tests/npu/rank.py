"""One rank of a group, as a process: python -m tests.npu.rank JOB, a JSON object with the fields of `Job`.

It answers requests by a scheduler of its own, which decides the same on each rank, and prints a JSON list of (token
ids, their log-probabilities, those of the prompt), one for each request.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec


class Job(msgspec.Struct):
    """Work of a rank.

    folder: of the model.
    rank, size: see Group.
    store: file in which the ranks meet.
    memory: descriptor of the shared memory; -1 for none.
    settings: of `load_runner`.
    prompts, sampling: of the requests, each of `tokens` tokens.
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


def main(job: Job) -> None:
    import torch.distributed as dist

    from npuserve.npu.execution.load import load_runner
    from npuserve.npu.parallel import Group
    from npuserve.npu.step import SamplingParams
    from tests.support.loop import Ask, serve

    group = Group(job.rank, job.size, dist.FileStore(job.store, job.size), job.memory) if job.size > 1 else None
    runner = load_runner(job.folder, **job.settings, group=group, progress=lambda done, total: None)
    asks = [Ask(0, None, {"prompt_ids": prompt, "max_tokens": job.tokens, "sampling": SamplingParams(**sampling)})
            for prompt, sampling in zip(job.prompts, job.sampling, strict=True)]
    answers, _ = serve(runner, asks, depth=2, pool=runner.num_blocks, seats=4, budget=16)
    print(msgspec.json.encode([
        (a.tokens, [one.logprob for one in a.logprobs], [one.logprob for one in a.prompt_logprobs])
        for a in answers]).decode())
    sys.stdout.flush()
    os._exit(0)  # a rank that ends later must not fail by the end of the group


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
