"""Files by which a folder says how its model pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LOGIT_SCORE = {"idx": 1, "name": "1", "path": "1_LogitScore",
               "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}


def write(folder: Path, path: str, content: Any) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def embeds(folder: Path, *, normalize: bool = True, prompts: dict[str, str] | None = None) -> Path:
    """Make the model of a folder an embedding model, as Qwen3-Embedding is one."""
    write(folder, "modules.json", [TRANSFORMER, POOLING, *([NORMALIZE] if normalize else [])])
    write(folder, "1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True})
    write(folder, "config_sentence_transformers.json", {"prompts": prompts or {}, "default_prompt_name": None})
    return folder


def ranks(folder: Path, true_id: int, false_id: int | None, instruction: str | None = None) -> Path:
    """Make the model of a folder a reranker, as Qwen3-Reranker is one."""
    write(folder, "modules.json", [TRANSFORMER, LOGIT_SCORE])
    write(folder, "1_LogitScore/config.json", {"true_token_id": true_id, "false_token_id": false_id})
    prompts = {} if instruction is None else {"default": instruction}
    write(folder, "config_sentence_transformers.json",
          {"prompts": prompts, "default_prompt_name": "default" if prompts else None})
    return folder


TEMPLATE = """{% for m in messages if m.role == 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}
{% for m in messages if m.role == 'query' %}Query: {{ m.content }}{% endfor %}
{% for m in messages if m.role == 'document' %}Document: {{ m.content }}{% endfor %}<|im_end|>"""
"""Chat template of a reranker."""


def pair_text(query: str, document: str, instruction: str) -> str:
    """Return what TEMPLATE renders."""
    return f"<|im_start|>{instruction}<|im_end|>Query: {query}Document: {document}<|im_end|>"


def saved_embedder(model: Any, folder: Path) -> Path:
    """Save a decoder as an embedding model like Qwen3-Embedding, whose tokenizer appends the end-of-text token."""
    from tokenizers import processors

    from tests.support import tokenizers

    trained = tokenizers.train()
    end = "<|endoftext|>"
    trained.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, trained.token_to_id(end))])
    model.model.save_pretrained(folder)
    tokenizers.save(folder, trained, {"tokenizer_class": "Qwen2Tokenizer"})
    return embeds(folder, prompts={"query": "Find: "})


def saved_classifier(folder: Path, labels: int = 1, **shape: Any) -> Any:
    """Save a random Qwen3ForSequenceClassification, and return it."""
    import torch
    from transformers import Qwen3ForSequenceClassification

    from tests.support.models import random_model

    config = random_model("qwen3", **shape).config
    config.num_labels = labels
    config.pad_token_id = None
    torch.manual_seed(5)
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


def qwen3_text(query: str, document: str, instruction: str) -> str:
    """Return the prompt in the model card of Qwen3-Reranker."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def saved_reranker(model: Any, folder: Path, instruction: str) -> Path:
    """Save a model as a reranker like Qwen3-Reranker. Its true and false tokens are 7 and 3."""
    from tests.support import tokenizers

    model.save_pretrained(folder)
    tokenizers.save(folder, tokenizers.train(), {"tokenizer_class": "Qwen2Tokenizer"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ranks(folder, 7, 3, instruction)
