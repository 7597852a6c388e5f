"""Configuration of a model, parsed from its config.json. Imports no torch.

Absent keys have the defaults of transformers (`families`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from npuserve.npu.model.config_json import ModelError, flag, number, whole
from npuserve.npu.model.families import FAMILIES, check_supported
from npuserve.npu.model.folder import EXAMPLE, check_downloaded, check_links, content_of
from npuserve.npu.model.rope_config import RopeConfig, parse_rope
from npuserve.npu.model.shard import WHOLE, Shard, Span
from npuserve.npu.quantization import Quantization

__all__ = ["HeadDtype", "ModelConfig", "ModelError"]

HeadDtype = Literal["auto", "int8"]

DTYPES = "bfloat16", "float16", "float32", "float64"
"""Possible dtypes of a checkpoint."""

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder with RMSNorm, rotary grouped-query attention and SwiGLU.

    vocab_size: ids are in [0, vocab_size).
    num_heads, num_kv_heads: number of query heads; number of key and value heads.
    max_position_embeddings: value of config.json. The limit for serving is `context_length`.
    qk_norm: the model applies RMSNorm to each query and key head.
    dtype: dtype of the checkpoint, as named in config.json.
    quantization: schemes of the int8 or float8 linear layers; None if there are none.
    lm_head_dtype: dtype of the served LM head and of a tied embedding; "auto" for the checkpoint's.
    shard: part of the model that this process computes. The other fields describe the whole model, except in `local`.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    dtype: str
    quantization: Quantization | None = None
    lm_head_dtype: HeadDtype = "auto"
    shard: Shard = WHOLE

    def sharded(self, shard: Shard) -> ModelConfig:
        """Return the configuration of a part of the model. Raises ModelError if the ranks cannot divide it."""
        n, kv = shard.size, self.num_kv_heads
        for name, count in (("attention heads", self.num_heads), ("intermediate columns", self.intermediate_size)):
            if count % n:
                raise ModelError(f"tensor_parallel_size: {n} does not divide the model's {count} {name}")
        if kv % n and n % kv:
            raise ModelError(
                f"tensor_parallel_size: {n} neither divides the model's {kv} key and value heads nor is a multiple")
        return replace(self, shard=shard)

    @property
    def local(self) -> ModelConfig:
        """Return the configuration with the numbers of heads and intermediate columns that this process computes."""
        if self.shard.size == 1:
            return self
        return replace(self, num_heads=self.num_heads // self.shard.size,
                       num_kv_heads=self.shard.kv_heads(self.num_kv_heads).size,
                       intermediate_size=self.intermediate_size // self.shard.size, shard=WHOLE)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def context_length(self) -> int:
        """Maximum number of prompt and output tokens.

        YaRN extends the context of the training regardless of max_position_embeddings (as in Qwen3's model cards).
        """
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.factor * self.rope.original_context))
        return self.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the checkpoint; a tied table counts once."""
        h, i = self.hidden_size, self.intermediate_size
        layer = 2 * h + (2 * self.head_dim if self.qk_norm else 0)
        layer += (self.q_size + 2 * self.kv_size) * (h + self.qkv_bias) + h * (self.q_size + self.o_bias)
        layer += 2 * i * (h + self.mlp_bias) + h * (i + self.mlp_bias)
        tables = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + h

    @property
    def headless(self) -> ModelConfig:
        """The same decoder without a separate LM head."""
        if self.tie_word_embeddings:
            return self
        quantization = self.quantization and replace(self.quantization, ignore=(*self.quantization.ignore, "lm_head"))
        return replace(self, tie_word_embeddings=True, quantization=quantization, lm_head_dtype="auto")

    @property
    def quantization_name(self) -> str:
        """"none", "w8a8", or "w8a8-fp8" if layers are float8."""
        if self.quantization is None:
            return "none"
        return "w8a8-fp8" if self.quantization.has_float8 else "w8a8"

    def padded_vocabulary(self, tile: int) -> int:
        """Return vocab_size rounded up to a multiple of `tile` on each rank."""
        tile *= self.shard.size
        return -(-self.vocab_size // tile) * tile

    def vocabulary(self, tile: int) -> Span:
        """Return the ids of this shard's rows of embedding and LM head."""
        return self.shard.vocabulary(self.vocab_size, self.padded_vocabulary(tile))

    @staticmethod
    def from_folder(folder: Path | str, lm_head_dtype: HeadDtype = "auto") -> ModelConfig:
        """Read `folder`/config.json. Raises ModelError."""
        path = Path(folder) / "config.json"
        check_links(Path(folder))
        check_downloaded([path])
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if other := content_of(path.parent):
                raise ModelError(f"{path.parent}: {other}") from None
            raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        return replace(ModelConfig.from_dict(data), lm_head_dtype=lm_head_dtype)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """Parse the contents of a config.json as transformers 4 or 5 writes it. Raises ModelError."""
        names = data.get("architectures") or []
        if not isinstance(names, list):
            raise ModelError(f"config.json: architectures: must be a list of names, got {names!r}")
        architecture = next((name for name in FAMILIES if name in names), None)
        if architecture is None:
            raise ModelError(f"config.json: architectures: {names} is not supported; serve a model of one of these: "
                             f"{', '.join(FAMILIES)}, such as {EXAMPLE}")
        family = FAMILIES[architecture]
        check_supported(data, family)

        num_layers = whole(data, "num_hidden_layers")
        if num_layers > MAX_LAYERS:
            raise ModelError(f"config.json: num_hidden_layers: must be in [1, {MAX_LAYERS}], got {num_layers}")
        heads = whole(data, "num_attention_heads")
        kv_heads = whole(data, "num_key_value_heads", family.num_kv_heads, heads)
        hidden = whole(data, "hidden_size")
        head_dim = whole(data, "head_dim", family.head_dim, hidden // heads)
        if heads % kv_heads:
            raise ModelError(f"config.json: num_key_value_heads: {kv_heads} does not divide {heads} attention heads")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim: must be even for rotary embeddings, got {head_dim}")
        attention_bias = flag(data, "attention_bias", False)
        context = whole(data, "max_position_embeddings", family.context)
        return ModelConfig(
            architecture=architecture,
            family=family.name,
            vocab_size=whole(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole(data, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(data, "rms_norm_eps", 1e-6),
            max_position_embeddings=context,
            tie_word_embeddings=flag(data, "tie_word_embeddings", False),
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=flag(data, "mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            rope=parse_rope(data, context),
            dtype=_dtype(data),
            quantization=_quantization(data),
        )


def _dtype(data: Mapping[str, Any]) -> str:
    found = data.get("dtype") or data.get("torch_dtype") or "float32"
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype: {found!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _quantization(data: Mapping[str, Any]) -> Quantization | None:
    try:
        quantization = Quantization.from_config(data)
    except ValueError as error:
        raise ModelError(f"config.json: {error}. Serve the model that this one was made from, or a W8A8 checkpoint of "
                         "that: npuserve quantize MODEL OUT") from None
    if quantization and flag(data, "tie_word_embeddings", False) and quantization.of("lm_head"):
        raise ModelError(
            "config.json: tie_word_embeddings: the LM head is quantized, and the embedding that it is tied to is not; "
            "supported: lm_head in quantization_config's ignore, or a model that is not tied")
    return quantization
