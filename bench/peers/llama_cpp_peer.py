"""llama.cpp through llama-cpp-python's plain C interface; MODEL is a GGUF file of make_gguf.py. See harness.py."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import harness
import llama_cpp as c
import numpy as np

STEP = 256  # llama.cpp rounds a sequence's capacity up to a multiple


class LlamaCpp(harness.Generator):
    name, version = "llama.cpp", c.__version__

    def __init__(self, args: argparse.Namespace) -> None:
        self.threads = args.threads
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(str(args.model).encode(), c.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"model: {args.model} was not loaded")
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        args.vocabulary = args.vocabulary or self.vocabulary
        self.weight_bytes = c.llama_model_size(self.model)
        text = ctypes.create_string_buffer(100)
        c.llama_model_desc(self.model, text, len(text))
        kind = text.value.decode().split(" ")[2:]  # "qwen3 0.6B Q4_0"
        if kind != ["BF16"]:
            self.name = f"llama.cpp {' '.join(kind)}"

    @cache  # noqa: B019 (one peer a process)
    def context(self, rows: int, capacity: int) -> Any:
        """Return a context for `rows` sequences of at most `capacity` tokens each."""
        params = c.llama_context_default_params()
        params.n_seq_max, params.n_ctx = rows, rows * capacity
        params.n_batch = rows * capacity
        params.n_threads = params.n_threads_batch = self.threads
        params.no_perf = True
        return c.llama_init_from_model(self.model, params)

    def run(self, prompts: list[list[int]], steps: int, tick: Callable[[], None]) -> None:
        rows, length = len(prompts), len(prompts[0])
        context = self.context(rows, -(-(length + steps + 1) // STEP) * STEP)
        c.llama_memory_clear(c.llama_get_memory(context), False)
        batch = c.llama_batch_init(rows * length, 0, 1)
        try:
            tokens = self.decode(context, batch, (
                (row, token, place, place == length - 1)
                for row, prompt in enumerate(prompts) for place, token in enumerate(prompt)))
            tick()
            for place in range(length, length + steps):
                tokens = self.decode(context, batch, (
                    (row, token, place, True) for row, token in enumerate(tokens)))
                tick()
        finally:
            c.llama_batch_free(batch)

    def decode(self, context: Any, batch: Any, inputs: Iterable[tuple[int, int, int, bool]]) -> list[int]:
        """Decode one batch of (row, token, position, sample the next token); return the sampled tokens."""
        wanted = []
        for number, (row, token, place, ends) in enumerate(inputs):
            batch.token[number], batch.pos[number] = token, place
            batch.n_seq_id[number], batch.seq_id[number][0], batch.logits[number] = 1, row, ends
            if ends:
                wanted.append(number)
        batch.n_tokens = number + 1
        if code := c.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        return [int(np.ctypeslib.as_array(c.llama_get_logits_ith(context, number), (self.vocabulary,)).argmax())
                for number in wanted]


if __name__ == "__main__":
    harness.main(LlamaCpp)
