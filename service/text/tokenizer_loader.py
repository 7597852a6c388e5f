"""Loader of a model folder's tokenizer. The result equals that of transformers' AutoTokenizer for the same folder.

There is one exception. For some classes transformers 5 takes only the vocabulary from tokenizer.json and builds the
normalizer and the pre-tokenizer itself; this loader takes them from tokenizer.json. They differ for LlamaTokenizer and
a tokenizer.json with the normalizer `Prepend`, as Llama 2's: here a text that begins with a space gets another one.

`load_tokenizer` takes the first of: tokenizer.json; vocab.json with merges.txt (`byte_bpe`); other files, if
transformers is installed, since only transformers can read them. Code in the folder is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from npuserve.service.config import ConfigError
from npuserve.service.text import byte_bpe
from npuserve.service.text.fast_tokenizer import FastTokenizer, open_tokenizer
from npuserve.service.text.template_process import load_template_process
from npuserve.service.text.tokenizer import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FILES = ("tokenizer.model", "tekken.json", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
_ENDOFTEXT = "<|endoftext|>"
_QWEN2 = "Qwen2Tokenizer"
_GPT2 = "GPT2Tokenizer"
_CLASS_DEFAULTS = {
    _QWEN2: {"eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT},
    _GPT2: {"bos_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
"""Named tokens of a tokenizer class, used for the names that tokenizer_config.json leaves out."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a model's folder; return None if the folder has no tokenizer files.

    Raises ConfigError, naming the file, if a file is malformed or of an unsupported kind.
    """
    try:
        config = _Config(folder)
        if (folder / "tokenizer.json").is_file():
            fast = _load_tokenizer_json(folder, config)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            fast = _load_byte_bpe(folder, config)
        elif any(any(folder.glob(pattern)) for pattern in OTHER_FILES):
            return _load_by_transformers(folder)
        else:
            return None
        named = {name: token for name, token in config.named.items() if fast.id_of(token) is not None}
        return Tokenizer(fast, named, load_template_process(folder, named))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer of {folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"tokenizer of {folder}: malformed: {type(error).__name__}: {error}") from error


class _Config:
    """Contents of tokenizer_config.json, special_tokens_map.json and added_tokens.json, by transformers' rules.

    special_tokens_map.json and added_tokens.json are read only if tokenizer_config.json has no added_tokens_decoder.

    class_name: class that AutoTokenizer selects, without "Fast"; "" if the files name none.
    added: id to the fields of an AddedToken.
    named: name, such as eos_token, to the token's text.
    special: text to the fields of an AddedToken, for all tokens that the files make special.
    extra: texts of tokens that are special unless they are added tokens already: these keep their flags.
    defaults: texts of the tokens that only the class makes special; the vocabulary may lack them.
    """

    def __init__(self, folder: Path):
        self.values = _read_json(folder / "tokenizer_config.json")
        self.class_name = _class_name(self.values.get("tokenizer_class"), _read_json(folder / "config.json"))
        fields: dict[str, dict[str, Any]] = {}
        if "added_tokens_decoder" in self.values:
            self.added = {int(i): _fields(token) for i, token in self.values["added_tokens_decoder"].items()}
            fields = {token["content"]: token for token in self.added.values()}
        else:
            self.values.update(_read_json(folder / "special_tokens_map.json"))
            self.added = {}
        # A model may define names besides the standard ones, such as image_token.
        named = {k: v for k, v in self.values.items() if k.endswith("_token") and (k in NAMED or isinstance(v, str))}
        extra = self.values.get("extra_special_tokens") or self.values.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            named |= extra
            extra = []
        self.named = {name: _content(token) for name, token in named.items() if token}
        defaults = {k: v for k, v in _CLASS_DEFAULTS.get(self.class_name, {}).items() if k not in named}
        self.named.update(defaults)
        self.defaults = set(defaults.values())
        # The class Qwen2Tokenizer makes all of these tokens special.
        self.extra = {*map(_content, extra if self.class_name != _QWEN2 else [])} - {*self.named.values()}
        self.special: dict[str, dict[str, Any]] = {}
        for token in [*filter(None, named.values()), *extra]:
            content = _content(token)
            if content in self.extra and content in fields:
                continue
            flags = _fields(token) if isinstance(token, dict) else {"content": content, "normalized": False}
            self.special[content] = {**flags, **fields.get(content, {}), "special": True}
        if "added_tokens_decoder" not in self.values:
            for content, i in _read_json(folder / "added_tokens.json").items():
                special = content in self.special
                self.added[int(i)] = {"content": content, "normalized": not special, "special": special}

    def flag(self, name: str) -> bool:
        return self.values.get(name) is True


def _class_name(name: object, model: Mapping[str, Any]) -> str:
    """Return the class that AutoTokenizer selects.

    name: tokenizer_class of tokenizer_config.json.
    model: content of config.json.
    """
    class_name = name.removesuffix("Fast") if isinstance(name, str) else ""
    kind = model.get("model_type")
    return _QWEN2 if kind == "qwen2" or (kind == "qwen3" and not class_name) else class_name


def _read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, {} if there is no such file. Raise ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: must be an object")
    return value


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _fields(token: Mapping[str, Any]) -> dict[str, Any]:
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": str(token["content"]), **{flag: bool(token[flag]) for flag in flags if flag in token}}


def _load_tokenizer_json(folder: Path, config: _Config) -> FastTokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"tokenizer.json: {error}") from error
    # Only added_tokens_decoder of tokenizer_config.json takes precedence over the fields of tokenizer.json.
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    kept = known if "added_tokens_decoder" not in config.values else {}
    new = [fields for _, fields in sorted(config.added.items()) if fields["content"] not in kept]
    tokenizer.add_tokens([tokenizers.AddedToken(**fields) for fields in new])
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = [kept.get(c) or tokenizers.AddedToken(**fields) for c, fields in config.special.items()
               if c not in config.extra & present]
    special += [known.get(c) or tokenizers.AddedToken(c, normalized=False) for c in sorted(config.defaults)
                if tokenizer.token_to_id(c) is not None]
    for token in special:
        token.special = True
    tokenizer.add_special_tokens(special)
    tokenizer.encode_special_tokens = config.flag("split_special_tokens")
    if config.class_name in (_QWEN2, _GPT2):
        _set_prefix_space(tokenizer, config.flag("add_prefix_space"))
    return open_tokenizer(tokenizer)


def _set_prefix_space(tokenizer: tokenizers.Tokenizer, prefix_space: bool) -> None:
    """Set add_prefix_space of the pre-tokenizer ByteLevel."""
    if (pre_tokenizer := tokenizer.pre_tokenizer) is None:
        return
    state = json.loads(pre_tokenizer.__getstate__())
    for step in state.get("pretokenizers", [state]):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = prefix_space
    pre_tokenizer.__setstate__(json.dumps(state).encode())
    tokenizer.pre_tokenizer = pre_tokenizer


def _load_byte_bpe(folder: Path, config: _Config) -> FastTokenizer:
    class_name = config.values.get("tokenizer_class")
    if class_name not in byte_bpe.CLASSES:
        supported = ", ".join(byte_bpe.CLASSES)
        raise ValueError(f"tokenizer_class {class_name!r} with vocab.json and merges.txt: must be one of {supported}")
    if config.flag("split_special_tokens"):
        raise ValueError(
            f"tokenizer_config.json: split_special_tokens is not supported for {class_name} without tokenizer.json")
    vocabulary, merges = byte_bpe.read_vocabulary(folder)
    ids = {**vocabulary, **{fields["content"]: i for i, fields in config.added.items()}}
    tokens = {fields["content"]: fields for fields in config.added.values()} | config.special
    tokens |= {t: {"content": t, **tokens.get(t, {}), "special": True} for t in config.defaults if t in ids}
    for content in tokens:
        ids.setdefault(content, max(ids.values(), default=-1) + 1)
    if len(set(ids.values())) != len(ids):
        raise ValueError("vocab.json and the added tokens: an id has two tokens")
    flags = {"normalized": False}  # the library's default is not `special`
    added = {ids[content]: tokenizers.AddedToken(**{**flags, **fields}) for content, fields in tokens.items()}

    def around(flag: str, name: str) -> list[int]:
        token = config.named.get(name)
        return [ids[token]] if config.flag(flag) and token in ids else []

    tokenizer = byte_bpe.build(
        class_name,
        vocabulary,
        merges,
        added,
        prefix_space=config.flag("add_prefix_space"),
        head=around("add_bos_token", "bos_token"),
        tail=around("add_eos_token", "eos_token"),
    )
    return FastTokenizer(tokenizer, max(ids.values(), default=-1) + 1)


def _load_by_transformers(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("only transformers can read its files: install npuserve[transformers]") from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the class depends on the file format
        raise ValueError(f"transformers cannot load it: {error}") from error
    if not getattr(loaded, "is_fast", False):
        raise ValueError(f"{type(loaded).__name__}: must have a fast version in transformers")
    named = dict(loaded.special_tokens_map)
    return Tokenizer(open_tokenizer(loaded.backend_tokenizer), named, load_template_process(folder, named))
