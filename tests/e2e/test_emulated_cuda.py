"""A server on an emulated GPU, as `npuserve serve --device cuda --emulate` starts it.

Triton's interpreter runs the kernels of whole steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, request, serving, streamed
from tests.npu.backends.small import saved
from tests.support.real_models import model_folder

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")]

LIMITS = ("--dtype", "float32", "--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--block-size", "16")
PROMPTS = [[1, 403, 407, 261, 378, 44, 91], [1, 403, 407, 12, 9], [1, 300, 20, 4, 77, 8, 130, 5, 11, 61, 17, 33, 2, 90]]


def tokens(server: Server) -> Iterator[list[int]]:
    """Yield the tokens of all prompts, sent concurrently; the last request samples."""
    asks = [request(prompt, 8, ignore_eos=True) for prompt in PROMPTS]
    asks.append(request(PROMPTS[0], 8, ignore_eos=True, temperature=1.5, seed=7, top_k=50))
    with ThreadPoolExecutor(len(asks)) as pool:
        for _, ids, finish in pool.map(lambda ask: streamed(server.stub, ask), asks):
            assert len(ids) == finish.usage.generated_tokens == 8
            yield ids


@pytest.mark.parametrize("name", [pytest.param("stories260K-qwen3", marks=pytest.mark.model), "random"])
def test_tokens_are_those_of_the_cpu_in_float32(tmp_path: Path, name: str) -> None:
    folder = str(saved(tmp_path, layers=1, vocabulary=512) if name == "random" else model_folder(name))
    with serving(folder, "--device", "cuda", "--emulate", "--decode-buckets", "2", *LIMITS) as cuda:
        got = list(tokens(cuda))
        assert "emulated CUDA: proves calls and numbers, not speed" in cuda.log
        assert "captured mixed steps of 1, 2, 4, 8, 16 tokens" in cuda.log
        captured, decoder = (cuda.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "decoder"))
        assert captured > 0
        assert captured + decoder >= 4 * 7  # the sampler is not captured on CUDA
        assert cuda.stop() == 0
    with serving(folder, "--device", "cpu", *LIMITS) as cpu:
        assert got == list(tokens(cpu))
