"""Contents of a model's folder that a front end needs: tokenizer, names, end tokens and sampling defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npuserve.npu.model.config import ModelError
from npuserve.npu.model.folder import check_downloaded, check_links, content_of
from npuserve.npu.model.pooling import Pooling, TaskSetting, read_pooling
from npuserve.service.config import ConfigError

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

BUILT_IN = "storyteller"
MAX_ID = 1 << 31


class Range(NamedTuple):
    """Interval [low, high], or (low, high] with `above`."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: object) -> bool:
        """Return whether a number is in the interval; NaN is in none."""
        return isinstance(value, (int, float)) and self.low <= value <= self.high and not (
            self.above and value == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{self.low}, {self.high}]"


DEFAULT_RANGES = {
    "temperature": Range(0, 100), "top_p": Range(0, 1, above=True), "top_k": Range(-1, (1 << 31) - 1),
    "min_p": Range(0, 1), "repetition_penalty": Range(0, 100, above=True),
}
"""Sampling parameters whose defaults a model's generation_config.json may set, with their ranges."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Contents of a model's folder, read once by `open_folder`.

    name: name under which the model is served.
    names: values that a request's `model` field may have.
    eos_token_ids: ids that end an answer.
    defaults: values of absent sampling parameters.
    tokenizer: None if the folder has none.
    path: absolute path of the folder.
    config: content of config.json.
    pooling: how an embedding model or a reranker pools; None for a model that generates text.
    """

    name: str
    names: frozenset[str]
    eos_token_ids: frozenset[int] = frozenset()
    defaults: dict[str, float] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    path: Path = Path("/")
    config: dict[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None


def open_folder(folder: Path, model: str, served_name: str, task: TaskSetting = "auto") -> ModelFolder:
    """Read a model's folder and load its tokenizer.

    model: the user's name of the model.
    served_name: name to serve it under; "" for the default.
    task: see `read_pooling`.

    Raises ConfigError if the folder is unusable.
    """
    # Imports jinja2 and tokenizers, which programs that only look for the folder do not need.
    from npuserve.service.text.tokenizer_loader import load_tokenizer

    try:
        check_links(folder)
        check_downloaded(sorted(folder.glob("*.json")))
        pooling = read_pooling(folder, task)
    except ModelError as error:
        raise ConfigError(f"model: {error}") from None
    config = _read(folder / "config.json", required=True)
    generation = _read(folder / "generation_config.json")
    tokenizer = load_tokenizer(folder)
    name = served_as(folder, model, served_name)
    eos = _all_eos_ids(config, generation)
    if not eos and tokenizer and tokenizer.eos_id is not None:
        eos = frozenset({tokenizer.eos_id})
    return ModelFolder(
        name, frozenset({name, model} - {""}), eos, _defaults(generation), tokenizer, folder.absolute(), config,
        pooling)


def served_as(folder: Path, model: str, served_name: str) -> str:
    """Return the name under which a model is served. Arguments as in `open_folder`."""
    if served_name or not model:
        return served_name or BUILT_IN
    return folder.resolve().name if Path(model).expanduser().is_dir() else model


def _read(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            if other := content_of(path.parent):
                raise ConfigError(f"model: {path.parent} {other}") from None
            raise ConfigError(f"model: {path.parent} has no {path.name}; a model folder holds config.json and "
                              "*.safetensors") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return content


def read_eos_ids(folder: Path) -> frozenset[int]:
    """Return the ids of config.json and generation_config.json that end an answer, or a message of a chat.

    Raises ConfigError if a file is unusable.
    """
    return _all_eos_ids(_read(folder / "config.json", required=True), _read(folder / "generation_config.json"))


def _all_eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    size = config.get("vocab_size")
    return frozenset(
        i for i in (*_eos_ids(generation, "generation_config.json"), *_eos_ids(config, "config.json"))
        if 0 <= i < (size if isinstance(size, int) else MAX_ID))


def _eos_ids(data: dict[str, Any], file: str) -> list[int]:
    """Return the ids of eos_token_id, which is an id, a list of ids, or null. Some may be no tokens of the model."""
    value = data.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise ConfigError(f"model: eos_token_id in {file} is {value!r}, not a token id or a list of token ids")
    return values


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json: the ones that vLLM's `--generation-config auto` reads.

    As in transformers, "do_sample": false is temperature 0, and only the repetition penalty applies then.
    """
    defaults: dict[str, float] = {}
    names = tuple(DEFAULT_RANGES)
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
        names = ("repetition_penalty",)
    for name in names:
        allowed = DEFAULT_RANGES[name]
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or value not in allowed:
            raise ConfigError(f"model: {name} in generation_config.json is {value!r}, not in {allowed}")
        if name == "top_k":
            if value != int(value):
                raise ConfigError(f"model: top_k in generation_config.json is {value!r}, not a whole number")
            value = int(value)
        defaults[name] = value
    return defaults
