"""Embeddings by sentence-transformers, or by OpenVINO through optimum-intel, for embeddings.py.

    PYTHON bench/peers/embeddings_peer.py sentence-transformers|openvino MODEL THREADS DTYPE

Prints one line once the model is loaded. Then each line of stdin is a JSON list of texts, for which it prints the
seconds and the first text's embedding. Texts of similar length are in one batch, so that little is padding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH = 32


def sentence_transformers(model: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: loaded.encode(texts, batch_size=BATCH, show_progress_bar=False)


def openvino(model: str, threads: int, dtype: str) -> Callable[[list[str]], Any]:
    import numpy as np
    from optimum.intel import OVModelForFeatureExtraction
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    loaded = OVModelForFeatureExtraction.from_pretrained(
        model, export=True, ov_config={"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads})

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[Any] = [None] * len(texts)
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            inputs = tokenizer([texts[index] for index in batch], padding=True, return_tensors="np")
            last = np.asarray(loaded(**inputs).last_hidden_state)[:, -1]
            for index, row in zip(batch, last, strict=True):
                found[index] = row / np.linalg.norm(row)
        return found

    return embed


def main() -> None:
    peer, model, threads, dtype = sys.argv[1:]
    embed = {"sentence-transformers": sentence_transformers, "openvino": openvino}[peer](model, int(threads), dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        found = embed(texts)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "first": [float(value) for value in found[0]]}), flush=True)


if __name__ == "__main__":
    main()
