"""How an embedding model or a reranker uses the last hidden state of a prompt, read from its own files.

The files are those of sentence-transformers: modules.json lists the modules, each with the folder of its config.json;
config_sentence_transformers.json has the prompts, sentence_bert_config.json the maximum length. Imports no torch.

    modules.json                     task
    Transformer, Pooling             embed
    Transformer, Pooling, Normalize  embed, and embeddings have a norm of 1
    Transformer, LogitScore          rank
    Transformer                      rank, of a sequence classifier with one label

A reranker whose folder has no modules.json is served by the setting task=rank alone: nothing in its files says that it
ranks, and reward models and other rerankers have the same classes. A generator then scores as Qwen3-Reranker does, by
its tokens "yes" and "no"; a sequence classifier scores by its one label.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from npuserve.npu.model.families.config_json import ModelError
from npuserve.npu.model.folder import check_downloaded

Task = Literal["generate", "embed", "rank"]
TaskSetting = Literal["auto", "rank"]
"""Task that a user names; "auto" for the one of the folder's modules.json, and for text without."""

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
CLASSIFIER = "ForSequenceClassification"
"""End of the class name of a decoder with a classifier in place of an LM head."""
_TRUE, _FALSE = "yes", "no"
"""Tokens by which Qwen3-Reranker judges."""
_LAST_TOKEN = "lasttoken"
_BOOLEAN_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": _LAST_TOKEN,
}
"""Keys by which older versions name the mode."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Use of the last hidden state of a prompt.

    is_normalized: an embedding is divided by its L2 norm, unless the request says otherwise.
    true_id, false_id: tokens whose logits make a score; a false_id of None stands for a logit of 0.
    is_classifier: the logit of a score is the one of a classifier, in place of those of tokens.
    prompts: texts that may precede an input, by name. Those of a reranker are instructions.
    default_prompt: the text that precedes it by default; None for no text.
    max_tokens: longest input; 0 for the model's context.
    """

    task: Task
    is_normalized: bool = False
    true_id: int = 0
    false_id: int | None = None
    is_classifier: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int = 0


def read_pooling(folder: Path, task: TaskSetting = "auto") -> Pooling | None:
    """Return how the model in a folder pools; None for a model that generates text.

    Raises ModelError, naming the file, for a malformed one, for modules and modes that are not supported, and for a
    model of another task.
    """
    modules = _modules(folder)
    if modules is None:
        return None if task == "auto" else _read_reranker(folder)
    kinds = [kind for kind, _ in modules]
    paths = dict(modules)
    match kinds:
        case ["Transformer", "Pooling"] | ["Transformer", "Pooling", "Normalize"]:
            _check_mode(folder / paths["Pooling"] / "config.json")
            pooling = Pooling("embed", is_normalized="Normalize" in kinds)
        case ["Transformer", "LogitScore"]:
            path = folder / paths["LogitScore"] / "config.json"
            config = _read(path)
            pooling = Pooling("rank", true_id=_token_id(path, config, "true_token_id"),
                              false_id=_token_id(path, config, "false_token_id", is_optional=True))
        case ["Transformer"] if _is_classifier(config := _read(folder / "config.json")):
            pooling = _classifier(folder, config)
        case _:
            raise ModelError(f"{folder / MODULES}: {', '.join(kinds)} is not supported; supported: Transformer with "
                             "Pooling and Normalize, with LogitScore, or alone for a sequence classifier")
    if task not in ("auto", pooling.task):
        raise ModelError(f"{folder / MODULES}: is of a model for {pooling.task}, and task is {task}")
    prompts, default = _prompts(folder / PROMPTS)
    return replace(pooling, prompts=prompts, default_prompt=default,
                   max_tokens=_max_tokens(folder / paths["Transformer"] / "sentence_bert_config.json"))


def _read_reranker(folder: Path) -> Pooling:
    """Return how a reranker without modules.json scores."""
    config = _read(folder / "config.json")
    if _is_classifier(config):
        return _classifier(folder, config)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: has no tokenizer.json, whose tokens {_TRUE} and {_FALSE} make a score; task is rank")
    model = _read(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens = vocabulary if isinstance(vocabulary, dict) else {}
    if missing := [token for token in (_TRUE, _FALSE) if not isinstance(tokens.get(token), int)]:
        raise ModelError(f"{path}: has no token {missing[0]!r}, by which a reranker without {MODULES} judges")
    return Pooling("rank", true_id=tokens[_TRUE], false_id=tokens[_FALSE])


def _is_classifier(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(CLASSIFIER) for name in names)


def _classifier(folder: Path, config: dict[str, Any]) -> Pooling:
    """Return how a sequence classifier scores. The number of labels is that of transformers: 2 by default."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ModelError(f"{folder / 'config.json'}: a classifier of {count} labels is not supported; supported: one "
                         "label, whose logit is the score")
    return Pooling("rank", is_classifier=True)


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the class and the folder of each module, in order; None for a folder without modules.json."""
    path = folder / MODULES
    if not path.is_file():
        return None
    modules = _read(path, list)
    classes: list[tuple[str, str]] = []
    for module in modules:
        kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or (place and Path(place).name != place):
            raise ModelError(f"{path}: must be a list of modules with a type, and a path within the folder")
        classes.append((kind.rpartition(".")[2], place))
    return classes


def _check_mode(path: Path) -> None:
    """Raise ModelError for a mode other than the last token: the others need the hidden states of all tokens."""
    config = _read(path)
    named = config.get("pooling_mode", [mode for key, mode in _BOOLEAN_MODES.items() if config.get(key)])
    modes = [named] if isinstance(named, str) else named
    if modes != [_LAST_TOKEN]:
        text = " and ".join(map(str, modes)) if isinstance(modes, list) and modes else "mean"
        raise ModelError(f"{path}: the pooling mode {text} is not supported; supported: {_LAST_TOKEN}")


def _token_id(path: Path, config: dict[str, Any], name: str, is_optional: bool = False) -> Any:
    value = config.get(name)
    if (value is None and is_optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ModelError(f"{path}: {name}: must be a token id, got {value!r}")


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the text of the default one."""
    if not path.is_file():
        return {}, None
    config = _read(path)
    prompts = config.get("prompts") or {}
    default = config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts: must be an object of texts")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name: must be one of {', '.join(prompts)}; got {default!r}")
    return prompts, None if default is None else prompts[default]


def _max_tokens(path: Path) -> int:
    value = _read(path).get("max_seq_length") if path.is_file() else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelError(f"{path}: max_seq_length: must be a whole number of at least 1, got {value!r}")
    return value or 0


def _read(path: Path, kind: type[Any] = dict) -> Any:
    check_downloaded([path])
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, kind):
        raise ModelError(f"{path}: must hold a JSON {'object' if kind is dict else 'list'}")
    return content
