"""What a model's config.json says, checked and in the house's words. Imports no torch.

Defaults of absent keys are those of transformers (configuration_qwen3.py, configuration_qwen2.py,
configuration_llama.py), since that is what a checkpoint's author tested with.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from npuserve.npu.quantization import Quantization


class ModelError(ValueError):
    """This model cannot be served with these settings; the message says what is wrong and what is possible."""


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of a Git LFS pointer (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""

HeadDtype = Literal["auto", "int8"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `theta` matter to the kinds named.

    factor: linear, llama3, yarn. original_context: tokens of the pre-training context (llama3, yarn).
    low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate, attention_factor (cos and sin are
    multiplied by it): yarn.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes, or takes for granted where config.json is silent (None: no default)."""

    name: str
    qk_norm: bool
    qkv_bias: bool | None  # None: as attention_bias says, which then holds for the output projection too
    mlp_bias: bool | None  # None: as mlp_bias says
    sliding_window: bool
    num_kv_heads: int | None
    head_dim: int | None
    context: int


FAMILIES = {
    "Qwen3ForCausalLM": _Family("qwen3", True, None, False, True, 32, 128, 32768),
    "Qwen2ForCausalLM": _Family("qwen2", False, True, False, True, 32, None, 32768),
    "LlamaForCausalLM": _Family("llama", False, None, None, False, None, None, 2048),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary grouped-query attention, SwiGLU.

    vocab_size: ids are in [0, vocab_size). num_heads, num_kv_heads: of queries; of keys and values.
    qk_norm: RMSNorm of each query and key head. dtype: the checkpoint's, as config.json names it.
    max_position_embeddings: as in config.json; `context_length` is what may be served.
    quantization: which of its linear layers are int8; None if none is. lm_head_dtype: of the LM head as it is served,
    and of a tied embedding; "auto" for the checkpoint's.
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

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer that the position embedding is made for. YaRN stretches the context that the
        model was trained with, whatever max_position_embeddings says (as Qwen3's model cards have it)."""
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.factor * self.rope.original_context))
        return self.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint; a tied table counts once."""
        h, i = self.hidden_size, self.intermediate_size
        layer = 2 * h + (2 * self.head_dim if self.qk_norm else 0)
        layer += (self.q_size + 2 * self.kv_size) * (h + self.qkv_bias) + h * (self.q_size + self.o_bias)
        layer += 2 * i * (h + self.mlp_bias) + h * (i + self.mlp_bias)
        tables = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + h

    @property
    def headless(self) -> ModelConfig:
        """The same decoder without an LM head of its own."""
        if self.tie_word_embeddings:
            return self
        quantization = self.quantization and replace(self.quantization, ignore=(*self.quantization.ignore, "lm_head"))
        return replace(self, tie_word_embeddings=True, quantization=quantization, lm_head_dtype="auto")

    @property
    def quantization_name(self) -> str:
        """"none" or "w8a8"."""
        return "w8a8" if self.quantization else "none"

    def padded_vocabulary(self, tile: int) -> int:
        """vocab_size rounded up to a multiple of `tile`."""
        return -(-self.vocab_size // tile) * tile

    @staticmethod
    def from_folder(folder: Path | str, lm_head_dtype: HeadDtype = "auto") -> ModelConfig:
        """Read `folder`/config.json. Raises ModelError."""
        path = Path(folder) / "config.json"
        check_links(Path(folder))
        check_downloaded([path])
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        return replace(ModelConfig.from_dict(data), lm_head_dtype=lm_head_dtype)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a config.json, in transformers' style 4 or 5. Raises ModelError."""
        names = data.get("architectures") or []
        architecture = next((name for name in FAMILIES if isinstance(names, list) and name in names), None)
        if architecture is None:
            raise ModelError(f"config.json: architectures: {names} is not supported; supported: {', '.join(FAMILIES)}")
        family = FAMILIES[architecture]
        _refuse_unsupported(data, family)

        num_layers = _whole(data, "num_hidden_layers")
        heads = _whole(data, "num_attention_heads")
        kv_heads = _whole(data, "num_key_value_heads", family.num_kv_heads, heads)
        hidden = _whole(data, "hidden_size")
        head_dim = _whole(data, "head_dim", family.head_dim, hidden // heads)
        if heads % kv_heads:
            raise ModelError(f"config.json: num_key_value_heads: {kv_heads} does not divide {heads} attention heads")
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim: must be even for rotary embeddings, got {head_dim}")
        attention_bias = _flag(data, "attention_bias", False)
        context = _whole(data, "max_position_embeddings", family.context)
        return ModelConfig(
            architecture=architecture,
            family=family.name,
            vocab_size=_whole(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_whole(data, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(data, "rms_norm_eps", 1e-6),
            max_position_embeddings=context,
            tie_word_embeddings=_flag(data, "tie_word_embeddings", False),
            qk_norm=family.qk_norm,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=_flag(data, "mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
            rope=_rope(data, context),
            dtype=str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch."),
            quantization=_quantization(data),
        )


def check_downloaded(files: Iterable[Path]) -> None:
    """Raise ModelError for the first file that is a Git LFS pointer: the text in place of a file not downloaded."""
    for path in files:
        try:
            with path.open("rb") as file:
                pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        except OSError:
            continue  # whoever reads it says what is wrong
        if pointer:
            raise ModelError(
                f"{path}: is a Git LFS pointer, not the file itself; download it with: git -C {path.parent} lfs pull")


def check_links(folder: Path) -> None:
    """Raise ModelError for the first file of a model's folder that a symbolic link takes out of the folder.

    A file of a snapshot in the Hugging Face cache may be a link into the blobs of its repository:
    models--ORG--NAME/snapshots/REVISION/FILE -> models--ORG--NAME/blobs/HASH. The folder itself may be a link.
    """
    root = Path(os.path.realpath(folder))
    allowed, repository = [root], root.parent.parent
    if root.parent.name == "snapshots" and repository.name.startswith("models--"):
        allowed.append(repository / "blobs")
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        target = Path(os.path.realpath(path))  # unlike resolve(), it takes circular links
        if not any(target.is_relative_to(place) for place in allowed):
            raise ModelError(f"{path}: is a symbolic link to {target}; a model's file must lie in its folder "
                             f"({' or '.join(map(str, allowed))}): put a copy or a hard link there")


def _refuse_unsupported(data: Mapping[str, Any], family: _Family) -> None:
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act: {activation!r} is not supported; supported: silu")
    kinds = data.get("layer_types") or []
    window = data.get("sliding_window") if family.sliding_window and data.get("use_sliding_window") else None
    if not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types: must be a list, got {kinds!r}")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"config.json: layer_types: {', '.join(unknown)} is not supported; supported: full_attention")
    if window is None:
        return
    full = data.get("max_window_layers", 28)
    if isinstance(full, bool) or not isinstance(full, int):
        raise ModelError(f"config.json: max_window_layers: must be a whole number, got {full!r}")
    if "sliding_attention" in kinds if kinds else full < _whole(data, "num_hidden_layers"):
        raise ModelError(f"config.json: use_sliding_window: attention in a window of {window} tokens is not supported")


def _quantization(data: Mapping[str, Any]) -> Quantization | None:
    try:
        quantization = Quantization.from_config(data)
    except ValueError as error:
        raise ModelError(f"config.json: {error}") from None
    if quantization and _flag(data, "tie_word_embeddings", False) and quantization.of("lm_head"):
        raise ModelError(
            "config.json: tie_word_embeddings: the LM head is quantized, and the embedding that it is tied to is not; "
            "supported: lm_head in quantization_config's ignore, or a model that is not tied")
    return quantization


def _rope(data: Mapping[str, Any], context: int) -> RopeConfig:
    """rope_theta with rope_scaling (transformers 4), or rope_parameters (5), which hold both."""
    key = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    values = data.get(key) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"config.json: {key}: one object for all layers is supported, got {values}")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"config.json: {key}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = values.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor: {partial} is not supported; supported: 1")
    theta = _number(values, "rope_theta", _number(data, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(kind, theta)
    original = _whole(data, "original_max_position_embeddings", values.get("original_max_position_embeddings"), context)
    factor = _number(values, "factor", context / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
        if low == high:
            raise ModelError(f"config.json: {key}: low_freq_factor and high_freq_factor must differ, both are {low}")
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    if theta == 1.0:
        raise ModelError("config.json: rope_theta: must not be 1 under yarn")
    attention = _yarn_mscale(factor, 1.0)
    if values.get("mscale") and values.get("mscale_all_dim"):
        attention = _yarn_mscale(factor, _number(values, "mscale")) / _yarn_mscale(
            factor, _number(values, "mscale_all_dim"))
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=_flag(values, "truncate", True),
        attention_factor=_number(values, "attention_factor", attention),
    )


def _yarn_mscale(scale: float, weight: float) -> float:
    """The attention temperature of YaRN (Peng et al. 2023, equation 22), weighted as in DeepSeek-V2."""
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0


def _whole(data: Mapping[str, Any], key: str, *defaults: int | None) -> int:
    """A whole number >= 1. A key that is absent takes the first of `defaults` that is not None, a null the last."""
    value = data.get(key)
    if value is None and defaults:
        value = defaults[-1] if key in data else next((d for d in defaults if d is not None), None)
    if value is None:
        raise ModelError(f"config.json: {key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key}: must be a whole number of at least 1, got {value!r}")
    return value


def _number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number > 0; absent or null: the default."""
    value = data.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key}: must be a number above 0, got {value!r}")
    return float(value)


def _flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key}: must be true or false, got {value!r}")
    return value
