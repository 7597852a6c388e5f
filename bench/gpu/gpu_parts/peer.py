"""transformers with a static cache, its decode step in a CUDA graph, at the same shape, alternating with npuserve."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_parts import steps
from gpu_parts.shapes import json_of
from gpu_parts.worker import Context, Units

ROUNDS = 3


def units(context: Context) -> Units:
    for rows in (1, 2) if context.toy else (1, 8, 32):
        yield f"batch {rows}", lambda rows=rows: _batch(context, rows)


def _batch(context: Context, rows: int) -> Iterator[dict[str, Any]]:
    _, length, _, count = steps.sizes(context)
    most = 2 if context.toy else 32
    loaded, model = context.only("peer", lambda: (steps.load(context, "bf16", most), _model(context)))
    theirs = Decoder(model, rows, length, length + 2 * steps.WARM_UP + count + 2, context.gpu)
    pairs = []
    for _ in range(1 if context.toy else ROUNDS):
        pairs.append((steps.decode(loaded, rows, count).mean, theirs.seconds(count)))
    ratios = sorted(b / a for a, b in pairs)
    yield {"table": "Beside transformers, static cache" + (" in a CUDA graph" if context.gpu else ", no graph here"),
           "batch": rows, "context": length, "ours ms": statistics.median(a for a, _ in pairs) * 1e3,
           "theirs ms": statistics.median(b for _, b in pairs) * 1e3, "theirs / ours": statistics.median(ratios),
           "range": f"{ratios[0]:.2f}-{ratios[-1]:.2f}"}


def _model(context: Context) -> Any:
    """Return the model with random weights on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = json_of(context.args.shape)
    facts.pop("torch_dtype")
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device(context.backend.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


class Decoder:
    """Decode steps in static memory, of rows with a context of `length` tokens. graph: capture the step."""

    @torch.inference_mode()
    def __init__(self, model: Any, rows: int, length: int, capacity: int, graph: bool):
        from transformers import StaticCache

        self._model, self._length = model, length
        device = model.device
        self._cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.prompt = torch.randint(model.config.vocab_size, (rows, length), device=device)
        out = model(self.prompt, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._ids = out.logits[:, -1:].argmax(dim=-1)
        self._position = torch.full((1, 1), length, device=device)
        self._places = torch.arange(capacity, device=device)
        self._step: Callable[[], object] = self._decode
        if graph:
            self._step = self._captured()

    def _decode(self) -> None:
        mask = (self._places <= self._position).view(1, 1, 1, -1).expand(len(self._ids), 1, 1, -1)
        out = self._model(self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1,
                          position_ids=self._position.expand(len(self._ids), 1),
                          attention_mask={"full_attention": mask})
        self._ids.copy_(out.logits[:, -1:].argmax(dim=-1))
        self._position.add_(1)

    def _captured(self) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._decode()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph.replay

    @torch.inference_mode()
    def seconds(self, count: int) -> float:
        """Return the mean seconds of a step over `count` steps after the prompt."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._length)
        self._position.fill_(self._length)
        for _ in range(steps.WARM_UP):
            self._step()
        self._ids.tolist()  # waits for the device
        began = time.perf_counter()
        for _ in range(count):
            self._step()
        self._ids.tolist()
        return (time.perf_counter() - began) / count
