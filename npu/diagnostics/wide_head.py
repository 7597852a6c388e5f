"""Small models with the vocabulary of a real one, for checks of whole captured steps with an LM head of real width."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def widen(folder: Path, out: Path, vocabulary: int) -> None:
    """Write a model to the new folder `out` with more ids and an LM head of its own.

    Token i of n is token i * (vocabulary // n), so that the tokens are spread over the whole LM head. The rows of the
    LM head between two tokens are half the row before them: their logits are half as large, so none is the argmax
    where the largest logit is positive. The rows of the embedding between two tokens are 0.

    folder: model in one file, with tied embeddings.
    vocabulary: number of ids, at least the model's.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    table = tensors[EMBEDDING]
    if vocabulary < len(table):
        raise ValueError(f"vocabulary: {vocabulary} is less than the {len(table)} ids of the model")
    stride = vocabulary // len(table)
    first = torch.arange(len(table)) * stride
    embedding = torch.zeros(vocabulary, table.shape[1], dtype=table.dtype)
    head = table[(torch.arange(vocabulary) // stride).clamp(max=len(table) - 1)] / 2
    embedding[first] = head[first] = table
    out.mkdir()
    save_file(tensors | {EMBEDDING: embedding, LM_HEAD: head}, out / "model.safetensors", {"format": "pt"})
    config |= {"vocab_size": vocabulary, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config), "utf-8")
