"""Configuration of a model, parsed from its config.json. Imports no torch.

Absent keys have the defaults of transformers (`families`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from npuserve.npu.model.eagle import EagleHead, is_eagle, read_eagle, read_layer
from npuserve.npu.model.families import FAMILIES, REFUSED
from npuserve.npu.model.families.config_json import ModelError, flag, number, whole
from npuserve.npu.model.folder import EXAMPLE, check_downloaded, check_links, content_of, has_tensor
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.experts import STACKED_PARTS, Experts
from npuserve.npu.model.layers.layer import Array, DecoderLayer, Fixed, Layer, Paged
from npuserve.npu.model.layers.shard import WHOLE, DivisionError, Shard, Span
from npuserve.npu.model.pooling import CLASSIFIER, MODULES, Pooling, TaskSetting, read_pooling
from npuserve.npu.model.rope_config import RopeConfig, parse_rope
from npuserve.npu.quantization import modelslim
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.formats import quantization_of
from npuserve.npu.quantization.scheme import WeightScheme

__all__ = ["HeadDtype", "ModelConfig", "ModelError", "MtpSetting"]

HeadDtype = Literal["auto", "int8"]
MtpSetting = Literal["off", "auto", "on"]
"""Whether the head for multi-token prediction is loaded. auto: if the checkpoint has one. on: it must have one."""

MTP_PREFIX = "mtp."
"""Beginning of the names of that head's tensors."""

DTYPES = "bfloat16", "float16", "float32", "float64"
"""Possible dtypes of a checkpoint."""

NEXT_STEP = ("Serve the model that this one was made from, or a checkpoint of that in W8A8 or W4A16: npuserve quantize "
             "MODEL OUT")
"""End of the message about a quantization that is not supported."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder: an embedding, layers of blocks with RMSNorm, a last norm and an LM head.

    vocab_size: ids are in [0, vocab_size).
    layers: blocks of each decoder layer, of the whole model.
    max_position_embeddings: value of config.json. The limit for serving is `context_length`.
    prefix: beginning of the names of the decoder's tensors in the checkpoint.
    ignored: beginnings of the names of tensors that are not loaded, such as those of a vision tower.
    zero_centred_norms: the checkpoint has the weights of the norms before layers, and of the last one, less 1.
    dtype: dtype of the checkpoint, as named in config.json.
    quantization: schemes of the int8 or float8 linear layers; None if there are none.
    converts_float8, converts_int4: layers in float8, or in 4 bits, become floats while loading.
    stacks: matrices with the same input are stored as one where layer and forms allow it (`Layer.stackable`).
    lm_head_dtype: dtype of the served LM head and of a tied embedding; "auto" for the checkpoint's.
    draft_head_dtype: dtype of the LM head of an MTP head; "auto" for the served one, "int8" for one of its own beside a
        served one of floats.
    shard: part of the model that this process computes.
    pooling: use of the last hidden states by an embedding model or a reranker, which have no LM head here; None for a
        model that generates text.
    head: name of the matrix of the checkpoint's LM head, or of its classifier.
    mtp: layers of the head for multi-token prediction (MTP), which drafts tokens; () if it is not loaded.
    draft: smaller model that drafts tokens, or EAGLE-3 head, from a folder of its own; None for none.
    eagle: what an EAGLE-3 head has beside a model; None for a model. Then vocab_size is the number of its own ids.
    """

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[DecoderLayer, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str
    prefix: str = "model."
    ignored: tuple[str, ...] = ()
    zero_centred_norms: bool = False
    quantization: Quantization | None = None
    converts_float8: bool = False
    converts_int4: bool = False
    stacks: bool = False
    lm_head_dtype: HeadDtype = "auto"
    draft_head_dtype: HeadDtype = "auto"
    shard: Shard = WHOLE
    pooling: Pooling | None = None
    head: str = "lm_head"
    mtp: tuple[DecoderLayer, ...] = ()
    draft: ModelConfig | None = None
    eagle: EagleHead | None = None

    def with_draft(self, draft: ModelConfig) -> ModelConfig:
        """Return the configuration with a smaller model that drafts. Raises ModelError if that is not possible."""
        vocabulary = draft.eagle.vocabulary if draft.eagle else draft.vocab_size
        if vocabulary != self.vocab_size:
            raise ModelError(f"speculate: the model that drafts has {vocabulary} tokens in its vocabulary, the "
                             f"served one {self.vocab_size}; both must have the same tokens")
        if draft.has_fixed_state:
            raise ModelError(f"speculate: a model with linear attention ({draft.family}) cannot draft; possible are "
                             "models of attention alone")
        if self.pooling or draft.pooling:
            raise ModelError("speculate: models that embed or rank have no drafts")
        if draft.eagle and self.shard.size > 1:
            raise ModelError("speculate: an EAGLE-3 head is not possible with a tensor_parallel_size above 1")
        return replace(self, draft=draft)

    def sharded(self, shard: Shard) -> ModelConfig:
        """Return the configuration of a part of the model. Raises ModelError if the ranks cannot divide it."""
        if shard.whole_experts and (shard.size == 1 or not self.has_experts):
            what = "the model has no experts" if shard.size > 1 else "needs a tensor_parallel_size of at least 2"
            raise ModelError(f"expert_parallel: {what}")
        if error := self._division_error(shard):
            first = 2 if shard.whole_experts else 1
            sizes = [str(size) for size in range(first, shard.size)
                     if not self._division_error(replace(shard, rank=0, size=size))]
            raise ModelError(f"{error}; possible below are {', '.join(sizes) or 'none'}")
        return replace(self, shard=shard)

    def _division_error(self, shard: Shard) -> DivisionError | None:
        """Return why the ranks of a shard cannot divide the layers; None if they can."""
        try:
            for layer in self.kinds:
                layer.local(shard)
        except DivisionError as error:
            return error
        return None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def predictor(self) -> ModelConfig | None:
        """Return the configuration of the MTP head as a model of its own; None if it is not loaded.

        Embedding and LM head are those of the whole model.
        """
        return replace(self, layers=self.mtp, prefix=MTP_PREFIX, mtp=(), draft=None) if self.mtp else None

    def layer_name(self, index: int) -> str:
        """Return the beginning of the names of a decoder layer's tensors."""
        return self.eagle.layer if self.eagle else f"{self.prefix}layers.{index}."

    def first_layers(self, count: int) -> ModelConfig:
        """Return the configuration of the model's first `count` layers."""
        return replace(self, layers=self.layers[:count])

    @property
    def local_layers(self) -> list[Layer]:
        """Mixers and MLPs that this process computes, in the order of the blocks. Equal layers are one object."""
        local = {layer: layer.local(self.shard) for layer in self.kinds}
        return [local[block.layer] for blocks in self.layers for block in blocks]

    @property
    def layer_kernels(self) -> set[str]:
        """Kernels marked `by_layer` that a layer calls."""
        return {name for layer in self.local_layers for name in layer.kernels}

    def kernels_where(self, test: Callable[[str, tuple[int, ...]], bool]) -> set[str]:
        """Return the kernels of layers that pass a test of their names and sizes (`Layer.operator_sizes`)."""
        return {name for layer in self.local_layers for name, sizes in layer.operator_sizes.items()
                if test(name, sizes)}

    @property
    def kinds(self) -> list[Layer]:
        """Different mixers and MLPs of the whole model, in the order of their first use."""
        return list(dict.fromkeys(block.layer for blocks in self.layers for block in blocks))

    @property
    def attention(self) -> Attention:
        """The first attention of the whole model. Its head size is that of the rotary embeddings."""
        return next(layer for layer in self.kinds if isinstance(layer, Attention))

    @property
    def rotary_dim(self) -> int:
        """Columns of the table of rotary embeddings."""
        return self.rope.rotary_dim(self.attention.head_dim)

    @property
    def paged_states(self) -> list[Paged]:
        """Different paged states of the layers that this process computes."""
        return list(dict.fromkeys(layer.state for layer in self.local_layers if isinstance(layer.state, Paged)))

    @property
    def has_experts(self) -> bool:
        """True if layers are mixtures of experts."""
        return any(isinstance(layer, Experts) for layer in self.kinds)

    @property
    def held_experts(self) -> Span | None:
        """Experts of this rank; None if it has a part of each, or if there are none."""
        return next((layer.held for layer in self.local_layers if isinstance(layer, Experts)), None)

    @property
    def has_fixed_state(self) -> bool:
        """True if requests need a slot beside blocks."""
        return any(isinstance(layer.state, Fixed) for layer in self.local_layers)

    def slots_of(self, requests: int) -> int:
        """Return the slots of fixed state that as many requests need at least; 0 for a model without."""
        return requests if self.has_fixed_state else 0

    @property
    def embedding_dimension(self) -> int:
        """Number of values of an embedding; 0 for a model that does not embed."""
        return self.hidden_size if self.pooling and self.pooling.task == "embed" else 0

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
        """Number of parameters of the decoder in the checkpoint; a tied table counts once."""
        of_kind = {layer: _count(layer, self.hidden_size) for layer in self.kinds}
        blocks = sum(self.hidden_size + of_kind[block.layer] for blocks in self.layers for block in blocks)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return blocks + tables + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute a token: those of all layers and tables but the experts not chosen."""
        blocks = (block.layer for blocks in self.layers for block in blocks)
        return self.num_parameters - sum(layer.idle_parameters for layer in blocks if isinstance(layer, Experts))

    @property
    def headless(self) -> ModelConfig:
        """The same decoder without a separate LM head."""
        if self.tie_word_embeddings:
            return replace(self, mtp=(), draft=None)
        quantization = self.quantization and replace(self.quantization, ignore=(*self.quantization.ignore, "lm_head"))
        return replace(self, tie_word_embeddings=True, quantization=quantization, lm_head_dtype="auto", mtp=(),
                       draft=None)

    @property
    def schemes(self) -> list[WeightScheme]:
        """Return the schemes of the quantized layers as they are served."""
        groups = self.quantization.groups if self.quantization else ()
        return [scheme for _, scheme in groups if not self.becomes_floats(scheme)]

    def becomes_floats(self, scheme: WeightScheme) -> bool:
        """Return True if layers of the scheme become floats while loading."""
        return (scheme.act_order or (scheme.float8 and self.converts_float8) or (scheme.int4 and self.converts_int4))

    @property
    def has_float8(self) -> bool:
        """True if float8 layers are served."""
        return any(scheme.float8 for scheme in self.schemes)

    @property
    def quantization_name(self) -> str:
        """Name of the scheme of the first group of quantized layers; "none" without any."""
        return self.schemes[0].name if self.schemes else "none"

    def padded_vocabulary(self, tile: int) -> int:
        """Return vocab_size rounded up to a multiple of `tile` on each rank."""
        tile *= self.shard.size
        return -(-self.vocab_size // tile) * tile

    def vocabulary(self, tile: int) -> Span:
        """Return the ids of this shard's rows of embedding and LM head."""
        return self.shard.vocabulary(self.vocab_size, self.padded_vocabulary(tile))

    @staticmethod
    def from_folder(
        folder: Path | str,
        lm_head_dtype: HeadDtype = "auto",
        *,
        task: TaskSetting = "auto",
        float8: bool = True,
        int4: bool = True,
        stacks: bool = False,
        mtp: MtpSetting = "off",
    ) -> ModelConfig:
        """Read `folder`/config.json, and how the model pools. Raises ModelError.

        task: see `read_pooling`.
        float8, int4: the device multiplies weights in float8, and in 4 bits (`Capabilities`). Others become floats
            while loading.
        stacks: the device stacks matrices (`Capabilities.stacks`).
        mtp: whether the head for multi-token prediction is loaded.
        """
        data = _read(Path(folder))
        if is_eagle(data):
            raise ModelError(f"{folder}: is an EAGLE-3 head, which drafts for another model: serve that one, with "
                             f"speculate set to this folder (--speculate {folder})")
        pooling = read_pooling(Path(folder), task)
        config = replace(
            ModelConfig.from_dict(data, is_pooling=pooling is not None), lm_head_dtype=lm_head_dtype,
            converts_float8=not float8, converts_int4=not int4, stacks=stacks)
        if description := next(iter(sorted(Path(folder).glob(modelslim.DESCRIPTIONS))), None):
            config = replace(config, quantization=_modelslim(description))
            _check_tied(config)
        config = config._pooling(pooling, Path(folder)) if pooling else config
        return config._with_mtp(Path(folder), mtp)._experts_of(Path(folder))

    def draft_from_folder(self, folder: Path | str, *, float8: bool = True, int4: bool = True) -> ModelConfig:
        """Read a smaller model that drafts for this one, or an EAGLE-3 head. Raises ModelError.

        float8, int4: see `from_folder`.
        """
        data = _read(Path(folder))
        if not is_eagle(data):
            return ModelConfig.from_folder(folder, float8=float8, int4=int4)
        eagle = read_eagle(data, Path(folder), self.num_layers, self.hidden_size)
        context = whole(data, "max_position_embeddings", self.max_position_embeddings)
        return ModelConfig(
            architecture="Eagle3",
            family="eagle3",
            vocab_size=whole(data, "draft_vocab_size", eagle.vocabulary),
            hidden_size=whole(data, "hidden_size"),
            layers=(read_layer(data, Path(folder), eagle),),
            rms_norm_eps=number(data, "rms_norm_eps", 1e-6),
            max_position_embeddings=context,
            tie_word_embeddings=False,
            rope=parse_rope(data, context),
            dtype=_dtype(data),
            prefix="",
            eagle=eagle,
        )

    def _with_mtp(self, folder: Path, setting: MtpSetting) -> ModelConfig:
        """Return the configuration with its MTP head, or without. Raises ModelError if it must have one."""
        has_head = bool(self.mtp) and self.pooling is None and has_tensor(
            folder, f"{MTP_PREFIX}pre_fc_norm_hidden.weight")
        if setting == "on" and not has_head:
            raise ModelError(f"speculate: mtp: {folder} has no head for multi-token prediction (tensors "
                             f"{MTP_PREFIX}*); possible are off, auto and suffix")
        if setting == "off" or not has_head:
            return replace(self, mtp=())
        return replace(self, ignored=tuple(beginning for beginning in self.ignored if beginning != MTP_PREFIX))

    def without_mtp(self) -> ModelConfig:
        """Return the configuration without an MTP head, whose tensors are ignored."""
        return replace(self, mtp=(), ignored=(*self.ignored, MTP_PREFIX)) if self.mtp else self

    def _pooling(self, pooling: Pooling, folder: Path) -> ModelConfig:
        """Return the configuration of a model that pools. Some of their checkpoints hold the decoder alone, whose names
        have no prefix."""
        is_bare = has_tensor(folder, "norm.weight") and not has_tensor(folder, f"{self.prefix}norm.weight")
        prefix = "" if is_bare else self.prefix
        head = "score" if pooling.is_classifier else f"{prefix}embed_tokens" if self.tie_word_embeddings else "lm_head"
        return replace(self.headless, pooling=pooling, prefix=prefix, head=head)

    def _experts_of(self, folder: Path) -> ModelConfig:
        """Return the configuration with the form of the folder's experts: stacked in one tensor, or one by one. The MTP
        head may have another form than the decoder, which may be quantized."""
        decoder, head = (_has_stacked_experts(folder, prefix, layers)
                         for prefix, layers in ((self.prefix, self.layers), (MTP_PREFIX, self.mtp)))
        return replace(self, layers=_with_experts(self.layers, stacked=decoder),
                       mtp=_with_experts(self.mtp, stacked=head))

    def with_experts(self, *, stacked: bool) -> ModelConfig:
        """Return the configuration of a checkpoint that has the decoder's experts stacked in one tensor, or one by
        one."""
        return replace(self, layers=_with_experts(self.layers, stacked=stacked))

    @staticmethod
    def from_dict(data: Mapping[str, Any], *, is_pooling: bool = False) -> ModelConfig:
        """Parse the contents of a config.json as transformers 4 or 5 writes it. Raises ModelError.

        is_pooling: the model may be a decoder without LM head, and must be causal, since it is computed in chunks.
        """
        names = data.get("architectures") or []
        if not isinstance(names, list):
            raise ModelError(f"config.json: architectures: must be a list of names, got {names!r}")
        bare = next((name for name in names if _generator(name, "Model") in FAMILIES), None)
        classifier = next((name for name in names if _generator(name, CLASSIFIER) in FAMILIES), None)
        if bare and not is_pooling:
            raise ModelError(f"config.json: architectures: {bare} has no LM head, and the folder has no {MODULES}, "
                             "which says how an embedding model pools")
        if classifier and not is_pooling:
            raise ModelError(f"config.json: architectures: {classifier} has a classifier in place of an LM head, and "
                             f"the folder has no {MODULES}; if it is a reranker, serve it with task set to rank "
                             "(--task rank)")
        if is_pooling and (data.get("is_causal") is False or data.get("use_bidirectional_attention")):
            raise ModelError("config.json: attention to later tokens is not supported (is_causal, "
                             "use_bidirectional_attention)")
        if bare:
            names = [_generator(bare, "Model")]
        elif classifier:
            names = [_generator(classifier, CLASSIFIER)]
        architecture = next((name for name in FAMILIES if name in names), None)
        if refused := next((name for name in REFUSED if name in names), None) if architecture is None else None:
            raise ModelError(f"config.json: architectures: {refused} is not supported: {REFUSED[refused]}")
        if architecture is None:
            raise ModelError(f"config.json: architectures: {names} is not supported; serve a model of one of these: "
                             f"{', '.join(FAMILIES)}, such as {EXAMPLE}")
        family = FAMILIES[architecture]
        data = family.text_config(data)
        context = whole(data, "max_position_embeddings", family.context)
        config = ModelConfig(
            architecture=architecture,
            family=family.name,
            vocab_size=whole(data, "vocab_size"),
            hidden_size=whole(data, "hidden_size"),
            layers=family.read_layers(data),
            rms_norm_eps=number(data, "rms_norm_eps", 1e-6),
            max_position_embeddings=context,
            tie_word_embeddings=flag(data, "tie_word_embeddings", False),
            rope=parse_rope(data, context, partial_of=whole(data, "head_dim") if family.rotates_part else 0),
            dtype=_dtype(data),
            prefix=family.prefix,
            ignored=family.ignored,
            zero_centred_norms=family.zero_centred_norms,
            quantization=_quantization(data),
            mtp=(family.read_mtp(data),) if family.read_mtp else (),
        )
        _check_tied(config)
        return config


def _read(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json. Raises ModelError."""
    path = folder / "config.json"
    check_links(folder)
    check_downloaded([path])
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if other := content_of(folder):
            raise ModelError(f"{folder}: {other}") from None
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data


def _has_stacked_experts(folder: Path, prefix: str, layers: tuple[DecoderLayer, ...]) -> bool:
    """Return whether a folder has the experts of layers stacked in one tensor."""
    blocks = ((index, block) for index, blocks in enumerate(layers) for block in blocks)
    first = next(((index, block) for index, block in blocks if isinstance(block.layer, Experts)), None)
    return first is not None and any(
        has_tensor(folder, f"{prefix}layers.{first[0]}.{first[1].name}.experts.{part}") for part in STACKED_PARTS)


def _with_experts(layers: tuple[DecoderLayer, ...], *, stacked: bool) -> tuple[DecoderLayer, ...]:
    return tuple(
        tuple(replace(block, layer=replace(block.layer, stacked=stacked)) if isinstance(block.layer, Experts)
              else block for block in blocks) for blocks in layers)


def _generator(name: object, end: str) -> str:
    """Return the class name of the decoder with an LM head, for a class name of the same decoder with another end."""
    return f"{str(name).removesuffix(end)}ForCausalLM" if str(name).endswith(end) else ""


def _count(layer: Layer, hidden: int) -> int:
    """Return the number of parameters of a layer."""
    count = 0
    for parameter in layer.parameters(hidden, WHOLE).values():
        if isinstance(parameter, Array):
            count += math.prod(parameter.whole)
        else:
            rows = sum(span.size for span in parameter.parts.values())
            count += rows * (parameter.columns.size + parameter.biased)
    return count


def _dtype(data: Mapping[str, Any]) -> str:
    value = data.get("dtype") or data.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype: {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _quantization(data: Mapping[str, Any]) -> Quantization | None:
    try:
        quantization = quantization_of(data)
        if quantization is not None:
            quantization = quantization.with_scales(_dtype(data).replace("float64", "float32"))
    except ValueError as error:
        raise ModelError(f"config.json: {error}. {NEXT_STEP}") from None
    return quantization


def _modelslim(path: Path) -> Quantization:
    """Read the description of a checkpoint of ModelSlim."""
    check_downloaded([path])
    try:
        return modelslim.read(json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ModelError(f"{error}. {NEXT_STEP}") from None


def _check_tied(config: ModelConfig) -> None:
    """Raise ModelError for a quantized LM head that is tied to an embedding in floats."""
    if config.quantization and config.tie_word_embeddings and config.quantization.of("lm_head"):
        raise ModelError(
            "config.json: tie_word_embeddings: the LM head is quantized, and the embedding that it is tied to is not; "
            "supported: lm_head in quantization_config's ignore, or a model that is not tied")
