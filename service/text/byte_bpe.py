"""Byte-level BPE tokenizers built from vocab.json and merges.txt, and the bytes of byte-level tokens.

Methods: byte-level BPE of GPT-2 (Radford et al. 2019), and the split rules of the GPT-2 and Qwen2 tokenizers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast")
"""Values of tokenizer_class that can be loaded without tokenizer.json."""
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def is_qwen2(class_name: str) -> bool:
    """Return whether the class normalizes to NFC and splits as Qwen2 does; the other ones are GPT-2's."""
    return class_name.startswith("Qwen2")


@functools.cache
def byte_characters() -> list[str]:
    """Return, for each of the 256 bytes, the printable character that a byte-level vocabulary writes for it."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@functools.cache
def _character_bytes() -> dict[str, int]:
    return {c: b for b, c in enumerate(byte_characters())}


def token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with characters outside the 256 is encoded as UTF-8."""
    table = _character_bytes()
    try:
        return bytes([table[c] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def build(
    class_name: str,
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Mapping[int, AddedToken] | None = None,
    *,
    prefix_space: bool = False,
    head: Sequence[int] = (),
    tail: Sequence[int] = (),
) -> Tokenizer:
    """Build a byte-level BPE tokenizer. Bytes that the vocabulary lacks produce no token.

    class_name: one of CLASSES.
    vocabulary: byte-level token to id.
    merges: pairs of tokens, in descending priority.
    added: tokens, by id, that are matched before the text is split; the id may be in the vocabulary too.
    prefix_space: prepend a space to a text that does not begin with one; for Qwen2 to each part that its split makes.
    head, tail: ids of added tokens that encode(add_special_tokens=True) puts around the text.

    Raises ValueError for a merge outside the vocabulary and for an id outside [0, 2**32 - 1].
    """
    added = added or {}
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise ValueError(f"merges.txt: merge {left!r} {right!r}: {token!r} is not in the vocabulary")
    # The library assigns ids of its own to added tokens that the model's vocabulary lacks.
    ids = {**vocabulary, **{token.content: i for i, token in added.items()}}
    if not all(0 <= i < 1 << 32 for i in ids.values()):
        raise ValueError("vocab.json and the added tokens: an id must be in [0, 4294967295]")
    tokenizer = Tokenizer(models.BPE(ids, list(merges)))
    if is_qwen2(class_name):
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([token for token in added.values() if not token.special])
    tokenizer.add_special_tokens([token for token in added.values() if token.special])
    if head or tail:
        around = {"head": head, "tail": tail}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(["head"] if head else []), "$A", *(["tail"] if tail else [])],
            special_tokens=[
                {"id": name, "ids": list(around_ids), "tokens": [added[i].content for i in around_ids]}
                for name, around_ids in around.items() if around_ids])
    return tokenizer


def read_vocabulary(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges of a folder. Raise ValueError, naming the file, for malformed ones."""
    try:
        vocabulary = json.loads(_read(folder / "vocab.json"))
    except json.JSONDecodeError as error:
        raise ValueError(f"vocab.json: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(i) is int and i >= 0 for i in vocabulary.values()):
        raise ValueError("vocab.json: must be an object from token to id, an integer of at least 0")
    merges = []
    for number, line in enumerate(_read(folder / "merges.txt").split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise ValueError(f"merges.txt, line {number}: must be two tokens with a space between them")
        merges.append((pair[0], pair[1]))
    return vocabulary, merges


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error
