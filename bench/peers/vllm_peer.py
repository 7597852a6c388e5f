"""vLLM for CPUs in bfloat16; its engine is stepped directly, with engine and worker in processes of their own.

Two libraries must be preloaded, both in the environment's `lib` folder (install.sh puts them there): libiomp5.so, from
vLLM's package, and libtcmalloc_minimal.so.4. See harness.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import harness


def cores(args: argparse.Namespace) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))


def prepare(args: argparse.Namespace, **more: str) -> None:
    """Restart the process with the environment variables that vLLM needs, and `more`, unless they are set."""
    libraries = [Path(sys.prefix, "lib", name) for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    for library in libraries:
        if not library.exists():
            raise SystemExit(f"{library} is missing; see install.sh")
    wanted = {"LD_PRELOAD": ":".join(map(str, libraries)), "VLLM_CPU_KVCACHE_SPACE": "1",
              "VLLM_CPU_OMP_THREADS_BIND": cores(args), **more}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


class Vllm(harness.Generator):
    name = "vLLM"

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm

        self.version = vllm.__version__
        self.engine = vllm.LLM(str(args.model), dtype="bfloat16", max_model_len=args.length, max_num_seqs=32,
                               enable_prefix_caching=False).llm_engine
        self.parameters = vllm.SamplingParams
        self.numbers = itertools.count()

    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        params = self.parameters(temperature=0, ignore_eos=True, detokenize=False, max_tokens=steps + len(prompts) + 1)
        ids = [str(next(self.numbers)) for _ in prompts]
        for number, prompt in zip(ids, prompts, strict=True):
            self.engine.add_request(number, {"prompt_token_ids": prompt}, params)
        seen: set[str] = set()
        while len(seen) < len(ids):
            seen |= {output.request_id for output in self.engine.step()}
        tick()
        for _ in range(steps):
            self.engine.step()
            tick()
        self.engine.abort_request(ids)
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    harness.main(Vllm, prepare)
