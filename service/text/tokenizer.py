"""Text to token ids and back, as transformers' AutoTokenizer does it for the same folder, without transformers.

`load_tokenizer` reads, in this order: tokenizer.json (by the library `tokenizers`); vocab.json with merges.txt (by
`byte_bpe`); anything else that only transformers can read, where it is installed. Code in the folder is never run.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from npuserve.service.config import ConfigError
from npuserve.service.text import byte_bpe
from npuserve.service.text.incremental_decoder import ByteFallbackStream, ByteLevelStream, TextStream, WindowStream
from npuserve.service.text.plain_text import PlainText
from npuserve.service.text.template_process import TemplateProcess, contained

if TYPE_CHECKING:
    import tokenizers

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FILES = ("tokenizer.model", "tekken.json", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
MIN_LONGEST_BYTES = 256
"""Of a vocabulary that is not byte-level: its unknown token may stand for a whole word."""
LONG_IDS = 4096
"""Token ids beyond which decoding by the library `tokenizers` would hold up other threads for milliseconds."""
_ENDOFTEXT = "<|endoftext|>"
# What a class takes for a name that tokenizer_config.json does not speak of.
_CLASS_DEFAULTS = {
    "Qwen2Tokenizer": {"eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT, "pad_token": _ENDOFTEXT},
    "GPT2Tokenizer": {"bos_token": _ENDOFTEXT, "eos_token": _ENDOFTEXT, "unk_token": _ENDOFTEXT},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}


class Backend(Protocol):
    """What `Tokenizer` is made of. decoder: the `decoder` of tokenizer.json, {} for none."""

    @property
    def decoder(self) -> Mapping[str, object]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token(self, token_id: int) -> str | None: ...

    def id_of(self, token: str) -> int | None: ...

    @property
    def normalizes_special_tokens(self) -> bool:
        """Texts beside its own may be read as a special token, since the text is normalized before."""
        ...

    def renamed(self, names: Mapping[str, str]) -> Backend | None:
        """Return a backend that reads names[token] where this one reads the text of a special token, and that text as
        any other. None if this one reads no special tokens."""
        ...


class Tokenizer:
    """A model's tokenizer; safe to use from several threads.

    vocabulary_size: ids are below it; a model's may be larger, for padding. special_ids: those that
    skip_special_tokens leaves out. named_tokens: bos_token, eos_token and their like, where the folder names them.
    chat: None if the folder has no chat template. max_token_bytes: bytes of text of the longest token.
    """

    def __init__(
        self, backend: Backend, named_tokens: Mapping[str, str] | None = None, chat: TemplateProcess | None = None
    ):
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat = chat
        self.vocabulary_size = backend.vocabulary_size
        self.special_ids = backend.special_ids
        self.eos_id = self.id_of(self.named_tokens.get("eos_token", ""))
        self._fallback = _byte_fallback(backend.decoder)
        self.max_token_bytes = self._longest()
        self._token_bytes = functools.lru_cache(maxsize=1 << 18)(self._uncached_token_bytes)
        self._token_text = functools.lru_cache(maxsize=1 << 18)(self._uncached_token_text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """add_special_tokens: with the beginning-of-text token and its like, where the tokenizer has them.

        The text of an added or special token is read as that token, as vLLM and transformers do; `plain_text` reads a
        client's as any other text. The text of a chat brings its own beginning of text, so it is encoded with
        add_special_tokens=False.
        """
        return self._backend.encode(text, add_special_tokens)

    @functools.cached_property
    def plain_text(self) -> PlainText:
        """What reads the text of special tokens in a client's strings as plain text."""
        found = (self._backend.token(token) for token in sorted(self.special_ids))
        return PlainText(self._backend, [text for text in found if text])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Bytes that are no UTF-8 become U+FFFD; ids that are no token leave no text."""
        if len(ids) <= LONG_IDS or self._backend.decoder.get("type") != "ByteLevel":
            return self._backend.decode(ids, skip_special_tokens)
        # `tokenizers` lets no other thread run meanwhile.
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self._token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """A lone token's text as it stands inside a text: with its leading space; U+FFFD for a part of a character."""
        return self._token_text(token_id)

    def _uncached_token_text(self, token_id: int) -> str:
        stream = self._stream(frozenset(), [token_id])
        pieces = stream.feed(token_id)
        rest, tail = stream.flush()
        return "".join(piece.text for piece in [*pieces, *rest]) + tail

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary; None if there is none."""
        return self._backend.id_of(token)

    def text_stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """What ids that follow prompt_ids add to the text.

        For byte-level BPE that is their decode. A SentencePiece-style decoder leaves out the first space of a text, so
        there it is what they add to a prompt with text: its first space is kept. Bytes at the end of the prompt and
        the beginning of the answer are never joined to one character.
        """
        return self._stream(self.special_ids if skip_special_tokens else frozenset(), prompt_ids)

    def _stream(self, skipped: frozenset[int], prompt_ids: Sequence[int]) -> TextStream:
        if self._backend.decoder.get("type") == "ByteLevel":
            return ByteLevelStream(lambda i: b"" if i in skipped else self._token_bytes(i))
        if self._fallback is None:
            return WindowStream(lambda ids: self._backend.decode(ids, False), skipped, prompt_ids)
        replace, stripped, strip = self._fallback

        def token_text(token_id: int) -> tuple[str, int | None]:
            token = None if token_id in skipped else self._backend.token(token_id)
            if token is None:
                return "", None
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                return "", int(token[3:5], 16)
            return token.replace(*replace), None

        prompted = any(token_text(i) != ("", None) for i in prompt_ids)
        return ByteFallbackStream(token_text, stripped, 0 if prompted else strip)

    def _longest(self) -> int:
        """Return the bytes of text of the longest token, MIN_LONGEST_BYTES at least where it may stand for others."""
        tokens = filter(None, map(self._backend.token, range(self.vocabulary_size)))
        if self._backend.decoder.get("type") == "ByteLevel":
            return max((len(byte_bpe.token_bytes(token)) for token in tokens), default=1)
        return max(MIN_LONGEST_BYTES, *(len(token.encode(errors="replace")) for token in tokens))

    def _uncached_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.token(token_id)
        return b"" if token is None else byte_bpe.token_bytes(token)


def _byte_fallback(decoder: Mapping[str, Any]) -> tuple[tuple[str, str], str, int] | None:
    """Of a decoder [Replace,] ByteFallback, Fuse[, Strip at the start]: what is replaced by what, the stripped
    character, and how many of them. None for another decoder."""
    steps = list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else []
    replace, stripped, strip = ("\0", "\0"), " ", 0
    if steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replace = steps[0]["pattern"]["String"], steps.pop(0)["content"]
    if steps and steps[-1]["type"] == "Strip" and not steps[-1]["stop"]:
        stripped, strip = steps[-1]["content"], steps.pop()["start"]
    if [step["type"] for step in steps] != ["ByteFallback", "Fuse"]:
        return None
    return replace, stripped, strip


class _Fast:
    """Backend by the library `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.decoder: Mapping[str, object] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocabulary_size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.normalizes_special_tokens = tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # As a batch, since `tokenizers` lets other threads run only then: a long text would stop the whole front end.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def renamed(self, names: Mapping[str, str]) -> _Renamed | None:
        return None if self._tokenizer.encode_special_tokens else _Renamed(self._tokenizer, names)


class _Renamed(_Fast):
    """A tokenizer that shares its model with another, in which special tokens have other texts. Its ids are the
    other's."""

    def __init__(self, other: tokenizers.Tokenizer, names: Mapping[str, str]):
        import tokenizers

        own = tokenizers.Tokenizer(other.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(other, part)) is not None:
                setattr(own, part, value)
        added = other.get_added_tokens_decoder()
        texts = {i: names[token.content] if token.special else token.content for i, token in sorted(added.items())}
        own.add_tokens([
            tokenizers.AddedToken(
                text, single_word=added[i].single_word, lstrip=added[i].lstrip, rstrip=added[i].rstrip,
                normalized=added[i].normalized, special=False)
            for i, text in texts.items()])
        super().__init__(own)
        self._ids = {own.token_to_id(text): i for i, text in texts.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._ids.get(i, i) for i in super().encode(text, add_special_tokens)]


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder; None if it has no tokenizer files.

    Raises ConfigError, naming the file, where one cannot be read or its kind is not supported.
    """
    try:
        config = _Config(folder)
        if (folder / "tokenizer.json").is_file():
            backend: Backend = _load_fast(folder, config)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            backend = _load_byte_bpe(folder, config)
        elif any(any(folder.glob(pattern)) for pattern in OTHER_FILES):
            return _load_by_transformers(folder)
        else:
            return None
        named = {name: token for name, token in config.named.items() if backend.id_of(token) is not None}
        return Tokenizer(backend, named, contained(folder, named))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer of {folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"tokenizer of {folder}: malformed: {type(error).__name__}: {error}") from error


class _Config:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json of a folder, by transformers' rules.

    special_tokens_map.json and added_tokens.json count only where tokenizer_config.json has no added_tokens_decoder.
    added: id to the fields of an AddedToken. named: token by name. special: fields of all tokens that it makes special.
    defaults: tokens that the class makes special, if there are such.
    """

    def __init__(self, folder: Path):
        self.values = read_json(folder / "tokenizer_config.json")
        name = self.values.get("tokenizer_class") or ""
        self.class_name = name.removesuffix("Fast") if isinstance(name, str) else ""
        fields: dict[str, dict[str, Any]] = {}
        if "added_tokens_decoder" in self.values:
            self.added = {int(i): _fields(token) for i, token in self.values["added_tokens_decoder"].items()}
            fields = {token["content"]: token for token in self.added.values()}
        else:
            self.values.update(read_json(folder / "special_tokens_map.json"))
            self.added = {}
        # Names beside the standard ones, such as image_token, are the model's own.
        own = {k: v for k, v in self.values.items() if k.endswith("_token") and (k in NAMED or isinstance(v, str))}
        extra = self.values.get("extra_special_tokens") or self.values.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            own, extra = own | extra, []
        self.named = {name: _content(token) for name, token in own.items() if token}
        defaults = {k: v for k, v in _CLASS_DEFAULTS.get(self.class_name, {}).items() if k not in own}
        self.named.update(defaults)
        self.defaults = set(defaults.values())
        self.special: dict[str, dict[str, Any]] = {}
        for token in [*filter(None, own.values()), *extra]:
            content = _content(token)
            flags = _fields(token) if isinstance(token, dict) else {"content": content, "normalized": False}
            self.special[content] = {**flags, **fields.get(content, {}), "special": True}
        if "added_tokens_decoder" not in self.values:
            for content, i in read_json(folder / "added_tokens.json").items():
                special = content in self.special
                self.added[int(i)] = {"content": content, "normalized": not special, "special": special}

    def flag(self, name: str) -> bool:
        return self.values.get(name) is True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Raises ValueError naming the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: must be an object")
    return value


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _fields(token: Mapping[str, Any]) -> dict[str, Any]:
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": str(token["content"]), **{flag: bool(token[flag]) for flag in flags if flag in token}}


def _load_fast(folder: Path, config: _Config) -> _Fast:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"tokenizer.json: {error}") from error
    # The fields of tokenizer_config.json's added_tokens_decoder win over those of tokenizer.json, others do not.
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    kept = known if "added_tokens_decoder" not in config.values else {}
    new = [fields for _, fields in sorted(config.added.items()) if fields["content"] not in kept]
    tokenizer.add_tokens([tokenizers.AddedToken(**fields) for fields in new])
    special = [kept.get(c) or tokenizers.AddedToken(**fields) for c, fields in config.special.items()]
    special += [known.get(c) or tokenizers.AddedToken(c, normalized=False) for c in sorted(config.defaults)
                if tokenizer.token_to_id(c) is not None]
    for token in special:
        token.special = True
    tokenizer.add_special_tokens(special)
    tokenizer.encode_special_tokens = config.flag("split_special_tokens")
    return _Fast(tokenizer)


def _load_byte_bpe(folder: Path, config: _Config) -> byte_bpe.ByteBPE:
    name = config.values.get("tokenizer_class")
    if name not in byte_bpe.SPLIT_RULES:
        supported = ", ".join(byte_bpe.SPLIT_RULES)
        raise ValueError(f"tokenizer_class {name!r} with vocab.json and merges.txt: must be one of {supported}")
    rule = byte_bpe.SPLIT_RULES[name]
    for flag in ("split_special_tokens", *(["add_prefix_space"] if rule is byte_bpe.QWEN2 else [])):
        if config.flag(flag):
            raise ValueError(f"tokenizer_config.json: {flag} is not supported for {name} without tokenizer.json")
    vocabulary, merges = byte_bpe.read_vocabulary(folder)
    ids = {**vocabulary, **{fields["content"]: i for i, fields in config.added.items()}}
    tokens = {fields["content"]: fields for fields in config.added.values()} | config.special
    tokens |= {t: {"content": t, **tokens.get(t, {}), "special": True} for t in config.defaults if t in ids}
    for content in tokens:
        ids.setdefault(content, max(ids.values(), default=-1) + 1)
    if len(set(ids.values())) != len(ids):
        raise ValueError("vocab.json and the added tokens: an id has two tokens")
    added = [byte_bpe.AddedToken(id=ids[content], **{"special": False, **f}) for content, f in tokens.items()]

    def around(flag: str, name: str) -> list[int]:
        token = config.named.get(name)
        return [ids[token]] if config.flag(flag) and token in ids else []

    return byte_bpe.ByteBPE(
        vocabulary,
        merges,
        rule,
        added,
        prefix_space=config.flag("add_prefix_space"),
        head=around("add_bos_token", "bos_token"),
        tail=around("add_eos_token", "eos_token"),
    )


def _load_by_transformers(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("only transformers can read its files: install npuserve[transformers]") from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of many classes, by file format
        raise ValueError(f"transformers cannot load it: {error}") from error
    if not getattr(loaded, "is_fast", False):
        raise ValueError(f"{type(loaded).__name__}: must have a fast version in transformers")
    named = dict(loaded.special_tokens_map)
    return Tokenizer(_Fast(loaded.backend_tokenizer), named, contained(folder, named))
