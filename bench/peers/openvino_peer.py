"""OpenVINO GenAI's continuous batching; MODEL is an export of optimum-cli. See harness.py.

Executed in bfloat16, or in float32 on a processor without bfloat16 products, where OpenVINO computes in nothing else.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import harness
import numpy as np
import openvino as ov
import openvino_genai as genai


class OpenVino(harness.Generator):
    name, version = "OpenVINO GenAI", genai.__version__.split("-")[0]

    def __init__(self, args: argparse.Namespace) -> None:
        self.weight_bytes = (args.model / "openvino_model.bin").stat().st_size
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = False
        bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if bf16 else "f32"
        scheduler.cache_size = 1 if bf16 else 2
        self.pipeline = genai.ContinuousBatchingPipeline(
            str(args.model), scheduler, "CPU",
            {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": args.threads,
             "KV_CACHE_PRECISION": precision})
        self.numbers = itertools.count()

    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        config = genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True, do_sample=False)
        # A request is cancelled when its handle is garbage-collected.
        handles = [self.pipeline.add_request(next(self.numbers), ov.Tensor(np.array([prompt], np.int64)), config)
                   for prompt in prompts]
        waiting = handles
        while waiting:
            self.pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        tick()
        for _ in range(steps):
            self.pipeline.step()
            tick()


if __name__ == "__main__":
    harness.main(OpenVino)
