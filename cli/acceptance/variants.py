"""Variants of the acceptance check: tokens of the built-in model in int8 and with the LM head of a real model, whatever
model is checked."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.kernels import supports_dtype
from npuserve.cli.acceptance.model import check_tokens
from npuserve.cli.acceptance.reference import load, load_reference
from npuserve.cli.acceptance.report import Finding, guarded
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.quantize.w8a8 import quantize_checkpoint
from npuserve.service.text.model_path import resolve

ROWS = 8
IDS = 151_936
"""Ids of the Qwen3 models."""

WIDE_PROMPTS, WIDE_ANSWER = slice(1, 5), 16
"""Prompts and tokens of an answer at IDS ids: few, since the logits of all positions are compared."""


EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Variant:
    """Quantized numbers in one or more parts of the model, or an LM head of real width.

    wide: the model has IDS ids, and an LM head apart from its embedding (`widen`).
    """

    name: str
    w8a8: bool = False
    lm_head_dtype: HeadDtype = "auto"
    kv_cache_dtype: str = "auto"
    wide: bool = False


VARIANTS = (
    Variant("W8A8, int8 head", w8a8=True, lm_head_dtype="int8"),
    Variant(f"W8A8, int8 head of {IDS:,}", w8a8=True, lm_head_dtype="int8", wide=True),
    Variant(f"head of {IDS:,}", wide=True),
    Variant("fp8 KV", kv_cache_dtype="fp8"),
    Variant("int8 KV", kv_cache_dtype="int8"),
)


def check_variants(backend: Backend, threads: int) -> Iterator[Finding]:
    """Yield the findings of `check_tokens` for each variant that the device has: in float32, if the device has it, and
    in its preferred dtype."""
    plain = resolve("")
    dtypes = dict.fromkeys([*(["float32"] if supports_dtype(backend, "float32") else []),
                            backend.resolve_dtype("auto", "bfloat16")])
    with tempfile.TemporaryDirectory() as folder:
        int8 = Path(folder) / "w8a8"
        quantize_checkpoint(plain, int8)
        for variant in VARIANTS:
            if (cached := QUANTIZED.get(variant.kv_cache_dtype)) and cached not in backend.cache_dtypes:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as variant_folder:
                for dtype in dtypes:
                    findings = _check(
                        variant, int8 if variant.w8a8 else plain, Path(variant_folder), dtype, backend, threads)
                    yield from guarded("variants", f"{variant.name}, {dtype}", findings)
                    gc.collect()


def _check(
    variant: Variant, folder: Path, wide_folder: Path, dtype: str, backend: Backend, threads: int
) -> Iterator[Finding]:
    """Yield the findings of one variant in one dtype. wide_folder: folder for a model that the variant needs."""
    count = WIDE_ANSWER if variant.wide else accept_tokens.ANSWER
    length = backend.block_size + 4 * accept_tokens.BUDGET + count
    vocabulary = ModelConfig.from_folder(folder).vocab_size
    prompts = accept_tokens.prompts_of(resolve(""), vocabulary, length - count)
    if variant.wide:
        if not (wide := wide_folder / "wide").exists():
            widen(folder, wide, IDS)
        folder = wide
        prompts = [[IDS // vocabulary * token for token in prompt] for prompt in prompts[WIDE_PROMPTS]]
    golden = load_reference(
        folder, backend, "float32", length, threads, variant.lm_head_dtype, variant.kv_cache_dtype)
    loaded = load(
        folder, backend, dtype, max_model_len=length, max_num_seqs=ROWS, max_num_batched_tokens=accept_tokens.BUDGET,
        kv_cache_dtype=variant.kv_cache_dtype, lm_head_dtype=variant.lm_head_dtype)
    for finding in check_tokens(loaded, golden, prompts, count, folder):
        yield replace(finding, part="variants", name=f"{variant.name}: {finding.name}")


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
