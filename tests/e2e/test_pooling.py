"""Embeddings and scores of a real server beside transformers, in float32 on the CPU."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from npuserve.service.text.tokenizer import Tokenizer
from npuserve.v1 import pooling_pb2
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving
from tests.support import tokenizers
from tests.support.models import random_model
from tests.support.pooling import pair_text, qwen3_text, saved_classifier, saved_embedder, saved_reranker

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {"vocab_size": 768, "max_position_embeddings": 512, "hidden_size": 64, "num_hidden_layers": 4}
SETTINGS = (
    "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "32MiB", "--max-num-batched-tokens", "96",
    "--block-size", "16")
INSTRUCTION = "Judge it"
WORDS = tokenizers.CORPUS.split()


def text(words: random.Random, longest: int) -> str:
    return " ".join(words.choices(WORDS, k=words.randint(1, longest)))


@torch.no_grad()
def last_hidden(model: Any, tokenizer: Tokenizer, prompt: str) -> torch.Tensor:
    return model.model(torch.tensor([tokenizer.encode(prompt)])).last_hidden_state[0, -1]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen3", **SHAPE)


@pytest.fixture(scope="module")
def embedder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Tokenizer]]:
    folder = saved_embedder(model, tmp_path_factory.mktemp("embedder"))
    with serving(str(folder), *SETTINGS) as server:
        yield server, tokenizers.load(folder)


def test_embeddings_of_many_calls_equal_transformers(model: Any, embedder: tuple[Server, Tokenizer]) -> None:
    server, tokenizer = embedder
    words = random.Random(1)
    texts = [text(words, 60) for _ in range(32)]
    texts += texts[:8]  # with a cached prefix

    def embedding(content: str) -> list[float]:
        return list(server.stub.Embed(pooling_pb2.EmbedRequest(text=content, prompt_name="query"), timeout=100).values)

    with ThreadPoolExecutor(16) as threads:
        found = np.array(list(threads.map(embedding, texts)))
    expected = torch.stack([last_hidden(model, tokenizer, f"Find: {content}") for content in texts])
    expected = torch.nn.functional.normalize(expected, dim=-1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    cut = server.stub.Embed(pooling_pb2.EmbedRequest(text=texts[0], prompt_name="query", dimensions=16)).values
    np.testing.assert_allclose(cut, expected[0, :16] / np.linalg.norm(expected[0, :16]), atol=1e-5)
    assert server.metric("npuserve_request_finish_total", reason="pooled") == 41
    assert server.metric("npuserve_prefix_cache_hits_total") > 0


def test_calls_of_another_task_are_refused(embedder: tuple[Server, Tokenizer]) -> None:
    server, _ = embedder
    for call, message in ((server.stub.Generate, request("a", 1)),
                          (server.stub.Rank, pooling_pb2.RankRequest(query="a", documents=["b"]))):
        with pytest.raises(grpc.RpcError) as error:
            call(message)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "is an embedding model; call Embed" in error.value.details()


@torch.no_grad()
def check_scores_of_setting(folder: Path, score: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Check the scores of a folder without modules.json, served by the setting. score: logit of a prompt's ids."""
    words = random.Random(3)
    query = text(words, 12)
    documents = [text(words, 50) for _ in range(24)]
    with serving(str(folder), *SETTINGS, "--task", "rank") as server:
        call = pooling_pb2.RankRequest(query=query, documents=documents, instruction=INSTRUCTION)
        scores = server.stub.Rank(call, timeout=100).scores
    tokenizer = tokenizers.load(folder)
    expected = [torch.sigmoid(score(torch.tensor([tokenizer.encode(qwen3_text(query, each, INSTRUCTION))]))).item()
                for each in documents]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert max(expected) - min(expected) > 0.01


@pytest.mark.full
def test_scores_of_a_generator_that_ranks_by_the_setting_equal_transformers(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizers.save(tmp_path, tokenizers.train(), {"tokenizer_class": "Qwen2Tokenizer"})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"yes": 750, "no": 751}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    def score(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids).logits[0, -1]
        return logits[750] - logits[751]

    check_scores_of_setting(tmp_path, score)


@pytest.mark.full
def test_scores_of_a_classifier_that_ranks_by_the_setting_equal_transformers(tmp_path: Path) -> None:
    classifier = saved_classifier(tmp_path, **SHAPE)
    tokenizers.save(tmp_path, tokenizers.train(), {"tokenizer_class": "Qwen2Tokenizer"})
    check_scores_of_setting(tmp_path, lambda ids: classifier(ids).logits[0, 0])


def test_order_of_pairs_equals_transformers_though_the_engine_dies(model: Any, tmp_path: Path) -> None:
    words = random.Random(2)
    query = text(words, 12)
    documents = [text(words, 50) for _ in range(80)]
    folder = saved_reranker(model, tmp_path / "reranker", INSTRUCTION)
    with serving(str(folder), *SETTINGS) as server:
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(
                server.stub.Rank, pooling_pb2.RankRequest(query=query, documents=documents), timeout=100)
            until(lambda: call.done() or server.metric("npuserve_request_finish_total", reason="pooled"), server)
            os.kill(engine_of(server), signal.SIGKILL)
            answer = call.result()
        tokenizer = tokenizers.load(folder)
    hidden = torch.stack([last_hidden(model, tokenizer, pair_text(query, each, INSTRUCTION)) for each in documents])
    expected = torch.sigmoid(hidden @ (model.lm_head.weight[7] - model.lm_head.weight[3])).detach().numpy()
    scores = np.array(answer.scores)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert (scores.argsort() == expected.argsort()).all()
    assert answer.usage.cached_tokens > 0
