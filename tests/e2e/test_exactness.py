"""Greedy tokens in float32 through gRPC equal the tokens of transformers under any load of the server.

The built-in model is always tested, with the tokens in story_ids.json, which transformers has made. The command below
writes them again. NPUSERVE_TEST_MODELS names the folder of the other models.

    python -m tests.e2e.test_exactness
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from npuserve.npu.storyteller import FOLDER
from tests.e2e.server import Server, request, serving, streamed
from tests.support.real_models import model_folder

STORIES = [
    "Once upon a time", "One day, a little girl named Lily", "The cat and the dog", "Tim wanted a new toy. He",
    "There was a big red ball in the park.", "\"Can I play with you?\" asked the bird.",
    "It was a dark night and the moon", "Mom said, \"Let us go to the beach!\" They",
]
CHATS = [
    "中国的首都是哪里?", "你是谁?", "Write a poem about the sea.", "1 + 1 等于几?", "What is the capital of France?",
    "请介绍一下长城。", "我喜欢🍎和🍌,你呢?", "def add(a, b):",
]
BLOCK = 16
POOL_BLOCKS = 32
TOKENS = 64
STORY_IDS = Path(__file__).with_name("story_ids.json")

Ids = tuple[list[int], list[int]]
"""Ids of a prompt and of its answer."""


@cache
def oracle(folder: Path, prompts: tuple[str, ...]) -> list[Ids]:
    """Return the ids of transformers. Those of the built-in model are kept in a file."""
    if folder == FOLDER:
        kept = json.loads(STORY_IDS.read_text())
        return [(kept[prompt][0], kept[prompt][1]) for prompt in prompts]
    return computed(folder, prompts)


def computed(folder: Path, prompts: tuple[str, ...]) -> list[Ids]:
    """Return the ids of transformers in float32, greedy, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                                  num_beams=1, repetition_penalty=1.0, pad_token_id=0)
        answers.append((ids[0].tolist(), made[0, ids.shape[1] :].tolist()))
    return answers


@pytest.mark.parametrize("prompt", [
    STORIES[0], *(pytest.param(prompt, marks=pytest.mark.full) for prompt in STORIES[1:])])
def test_kept_ids_are_those_of_transformers(prompt: str) -> None:
    assert oracle(FOLDER, (prompt,)) == computed(FOLDER, (prompt,))


def block_bytes(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * size * 4 * BLOCK


MODELS = [
    pytest.param("storyteller", STORIES, id="storyteller"),
    pytest.param("stories260K-qwen3", STORIES, id="stories260K-qwen3", marks=pytest.mark.model),
    pytest.param("stories260K", STORIES, id="stories260K", marks=pytest.mark.model),
    pytest.param("minimind2-small", CHATS, id="minimind2-small", marks=pytest.mark.model),
]


def check(server: Server, folder: Path, prompts: list[str], index: int) -> None:
    prompt_ids, expected = oracle(folder, tuple(prompts))[index]
    ask = request(prompts[index])
    text, ids, finish = streamed(server.stub, ask)
    assert finish.usage.prompt_tokens == len(prompt_ids)
    assert ids == expected
    whole = server.stub.Generate(request(prompt_ids), timeout=100)
    assert (whole.text, list(whole.token_ids)) == (text, expected)


@pytest.mark.full
@pytest.mark.parametrize(("name", "prompts"), MODELS)
def test_alone(name: str, prompts: list[str]) -> None:
    """Greedy requests run one by one. By default test_among_others runs them so too."""
    folder = model_folder(name)
    with serving(str(folder), "--dtype", "float32", "--max-num-batched-tokens", "48") as server:
        for index in range(len(prompts)):
            check(server, folder, prompts, index)


def check_seeded(server: Server) -> None:
    asks = [request(p, 48, temperature=1.0, seed=n, top_p=0.95) for n, p in enumerate(STORIES)]
    alone = [streamed(server.stub, ask) for ask in asks]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda ask: streamed(server.stub, ask), asks))
    assert [a[:2] for a in alone] == [t[:2] for t in together]
    assert len({tuple(ids) for _, ids, _ in alone}) == len(asks)


@pytest.mark.full
def test_with_one_step_in_flight() -> None:
    """By default test_quantized.py has the flag."""
    with serving("--dtype", "float32", "--no-double-buffering") as server, ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(check, server, FOLDER, STORIES, index) for index in range(len(STORIES))]:
            future.result()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prompts"), MODELS)
def test_among_others(name: str, prompts: list[str]) -> None:
    """The same tokens with random arrivals among 10 others, chunks of at most 32 tokens, preemption and prefix hits.

    And one by one. Seeded requests of the built-in model get the same tokens alone and together.
    """
    folder = model_folder(name)
    with among_others(folder, prompts) as server:
        for index in range(2):
            check(server, folder, prompts, index)
        if folder == FOLDER:
            check_seeded(server)


@contextmanager
def among_others(folder: Path, prompts: list[str], *flags: str, share: int = 1) -> Iterator[Server]:
    """Check a server, and yield it. share: number of ranks among which the KV cache is divided."""
    oracle(folder, tuple(prompts))
    chance = random.Random(7)
    shared = [chance.randrange(3, 500) for _ in range(24)]
    pool = block_bytes(folder) // share * POOL_BLOCKS
    with serving(str(folder), "--dtype", "float32", "--max-num-batched-tokens", "32", "--block-size", str(BLOCK),
                 "--kv-cache-memory", str(pool), "--max-model-len", "256", *flags) as server:
        stop = threading.Event()

        def other(number: int) -> None:
            while not stop.is_set():
                ids = shared + [chance.randrange(3, 500) for _ in range(chance.randrange(16, 96))]
                streamed(server.stub, request(ids, chance.randrange(20, 80), temperature=1.0, seed=number,
                                              ignore_eos=True, top_k=chance.choice([0, 5])))

        def target(index: int) -> None:
            time.sleep(chance.random())
            check(server, folder, prompts, index)

        with ThreadPoolExecutor(24) as threads:
            others = [threads.submit(other, number) for number in range(10)]
            targets = [threads.submit(target, index) for index in range(len(prompts))]
            try:
                for future in targets:
                    future.result()
            finally:
                stop.set()
            for future in others:
                future.result()
        assert server.metric("npuserve_preemptions_total") > 0
        assert server.metric("npuserve_prefix_cache_hits_total") > 0
        assert server.metric("npuserve_requests_running") == 0
        assert server.metric("npuserve_kv_cache_usage_ratio") == 0
        yield server


if __name__ == "__main__":
    made = dict(zip(STORIES, computed(FOLDER, tuple(STORIES)), strict=True))
    lines = (f"  {json.dumps(prompt)}: {json.dumps(ids)}" for prompt, ids in made.items())
    STORY_IDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
