"""Byte-level byte-pair encoding for folders that hold only vocab.json and merges.txt. Standard library alone.

Methods: byte-level BPE of GPT-2 (Radford et al. 2019), the split rules of the GPT-2 and Qwen2 tokenizers, and the
added-token rules of the library `tokenizers`, whose output this equals on characters whose Unicode properties both
know: those come from `unicodedata`, so a character newer than the interpreter's tables may split otherwise.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CACHED_WORD = 64  # longer words are rare and not worth remembering


class AddedToken(NamedTuple):
    """A token matched as a whole before the text is split. normalized: matched in the normalized text.

    lstrip, rstrip: swallows the white space on that side. single_word: not next to a word character.
    """

    id: int
    content: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _CharacterClasses(dict[int, str]):
    """Code point to one ASCII character that stands for its class, for str.translate; filled as characters appear.

    Letters are x, or themselves where a contraction may need them; numbers 0; \\r and \\n a newline; U+0020 and the
    apostrophe themselves; other white space a tab; everything else a dot.
    """

    def __init__(self, contractions: Mapping[str, str]):
        super().__init__({ord(c): image for c, image in contractions.items()})
        self.update({ord(c): "\n" for c in "\r\n"} | {ord(c): c for c in " '"})
        # White_Space of Unicode; str.isspace also has U+001C to U+001F.
        spaces = [9, 11, 12, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
        self.update(dict.fromkeys(spaces, "\t"))

    def __missing__(self, code: int) -> str:
        image = {"L": "x", "N": "0"}.get(unicodedata.category(chr(code))[0], ".")
        self[code] = image
        return image


class SplitRule(NamedTuple):
    """How text becomes words: `pattern` runs over the text's character classes. Every character is in some word."""

    pattern: re.Pattern[str]
    contractions: dict[str, str]
    nfc: bool


_LETTERS = "strevmld"
QWEN2 = SplitRule(
    re.compile(r"'(?:s|t|re|ve|m|ll|d)|[^\n0a-z]?[a-z]+|0| ?[^\s0a-z]+\n*|\s*\n+|\s+(?!\S)|\s+", re.ASCII),
    # Case is ignored: the long s folds to s.
    {c: c for c in _LETTERS} | {c.upper(): c for c in _LETTERS} | {"ſ": "s"},
    nfc=True,
)
GPT2 = SplitRule(
    re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[a-z]+| ?0+| ?[^\s0a-z]+|\s+(?!\S)|\s+", re.ASCII),
    {c: c for c in _LETTERS},
    nfc=False,
)
SPLIT_RULES = {"Qwen2Tokenizer": QWEN2, "Qwen2TokenizerFast": QWEN2, "GPT2Tokenizer": GPT2, "GPT2TokenizerFast": GPT2}


@functools.cache
def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary: 256 of them, all different."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


@functools.cache
def _character_bytes() -> dict[str, int]:
    return {c: b for b, c in enumerate(byte_characters())}


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level vocabulary's token stands for; UTF-8 of a token with characters outside the 256."""
    table = _character_bytes()
    try:
        return bytes([table[c] for c in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class ByteBPE:
    """A byte-level BPE tokenizer: a backend of `npuserve.service.text.tokenizer.Tokenizer`.

    vocabulary: byte-level token to id. merges: pairs, most important first. added: tokens matched as a whole; ids of
    their own or those of the vocabulary. prefix_space: a text that does not begin with a space gets one (GPT-2 only).
    head, tail: ids that encode(add_special_tokens=True) puts around the text. Bytes that the vocabulary lacks leave
    no token. Raises ValueError if a merge's parts or its result are not in the vocabulary.
    """

    decoder: Mapping[str, object] = {"type": "ByteLevel"}

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        rule: SplitRule,
        added: Iterable[AddedToken] = (),
        *,
        prefix_space: bool = False,
        head: Sequence[int] = (),
        tail: Sequence[int] = (),
    ):
        self._ids = dict(vocabulary)
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}  # pair of ids to (rank, merged id)
        for rank, (left, right) in enumerate(merges):
            for token in (left, right, left + right):
                if token not in self._ids:
                    raise ValueError(f"merge {left!r} {right!r}: {token!r} is not in the vocabulary")
            self._merges[self._ids[left], self._ids[right]] = rank, self._ids[left + right]
        self._rule = rule
        self._classes = _CharacterClasses(rule.contractions)
        self._prefix_space = prefix_space
        self._head, self._tail = list(head), list(tail)
        self._byte_symbols = [self._ids.get(c) for c in byte_characters()]
        self._added = added = list(added)
        self._ids.update({t.content: t.id for t in added})
        self._tokens = {i: token for token, i in self._ids.items()}
        self._match(added)
        self.normalizes_special_tokens = rule.nfc and any(t.special and t.normalized for t in added)
        self._cached_word = functools.lru_cache(maxsize=1 << 16)(self._encode_word)
        self.special_ids = frozenset(t.id for t in added if t.special)
        self.vocabulary_size = max(self._tokens, default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = list(self._head) if add_special_tokens else []
        for part in self._raw_matcher.split(text):
            if isinstance(part, AddedToken):
                ids.append(part.id)
                continue
            for piece in self._normalized_matcher.split(self._normalize(part)):
                if isinstance(piece, AddedToken):
                    ids.append(piece.id)
                else:
                    self._encode_plain(piece, ids)
        return ids + self._tail if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Ids that are no token leave no text; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        known = (self._tokens[i] for i in ids if i in self._tokens and i not in skipped)
        return b"".join(map(token_bytes, known)).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def renamed(self, names: Mapping[str, str]) -> ByteBPE:
        """Return a tokenizer that reads names[token] where this one reads the text of a special token."""
        other = copy.copy(self)
        other._match([t._replace(content=names[t.content]) if t.special else t for t in self._added])
        return other

    def _match(self, added: Sequence[AddedToken]) -> None:
        self._raw_matcher = _Matcher([(t.content, t) for t in added if not t.normalized])
        self._normalized_matcher = _Matcher([(self._normalize(t.content), t) for t in added if t.normalized])

    def _normalize(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._rule.nfc else text

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        """Appends the tokens of a text without added tokens."""
        if self._prefix_space and not text.startswith(" "):
            text = " " + text
        for match in self._rule.pattern.finditer(text.translate(self._classes)):
            word = text[match.start() : match.end()]
            ids.extend(self._cached_word(word) if len(word) <= CACHED_WORD else self._encode_word(word))

    def _encode_word(self, word: str) -> list[int]:
        """Merges the lowest-ranked pair, the leftmost of equals, until none is left: O(n log n).

        The symbols are a linked list: ids[i] is -1 once symbol i was merged into its left neighbour.
        """
        symbols = (self._byte_symbols[b] for b in word.encode("utf-8", "replace"))
        ids = [i for i in symbols if i is not None]
        n = len(ids)
        following, before = list(range(1, n + 1)), list(range(-1, n - 1))
        merges = self._merges
        pairs = enumerate(itertools.pairwise(ids))
        queue = [(merges[pair][0], i, merges[pair][1]) for i, pair in pairs if pair in merges]
        heapq.heapify(queue)
        while queue:
            rank, i, merged = heapq.heappop(queue)
            j = following[i]
            if j >= n or merges.get((ids[i], ids[j])) != (rank, merged):
                continue  # one of the two was merged since
            ids[i], ids[j] = merged, -1
            following[i] = k = following[j]
            if k < n:
                before[k] = i
            for left, right in ((before[i], i), (i, k)):
                if left >= 0 and right < n and (merge := merges.get((ids[left], ids[right]))):
                    heapq.heappush(queue, (merge[0], left, merge[1]))
        return [i for i in ids if i >= 0]


class _Matcher:
    """Cuts a text at added tokens: leftmost first, then longest. (text to match, token) pairs."""

    def __init__(self, tokens: Sequence[tuple[str, AddedToken]]):
        self._tokens = dict(tokens)
        longest_first = sorted((content for content in self._tokens if content), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def split(self, text: str) -> Iterator[str | AddedToken]:
        """The non-empty texts between the added tokens, and those."""
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            token = self._tokens[match.group()]
            first, last = match.span()
            if token.single_word and (_is_word(text[first - 1 : first]) or _is_word(text[last : last + 1])):
                continue
            if token.lstrip:
                while first > start and text[first - 1].isspace():
                    first -= 1
            if token.rstrip:
                while last < len(text) and text[last].isspace():
                    last += 1
            if start < first:
                yield text[start:first]
            yield token
            start = last
        if start < len(text):
            yield text[start:]


def _is_word(character: str) -> bool:
    return re.match(r"\w", character) is not None


def read_vocabulary(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """vocab.json and merges.txt of a folder. Raises ValueError naming the file and line that is wrong."""
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    if not isinstance(vocabulary, dict) or not all(type(i) is int and i >= 0 for i in vocabulary.values()):
        raise ValueError("vocab.json: must be an object from token to id, an integer of at least 0")
    merges = []
    for number, line in enumerate((folder / "merges.txt").read_text(encoding="utf-8").split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise ValueError(f"merges.txt, line {number}: must be two tokens with a space between them")
        merges.append((pair[0], pair[1]))
    return vocabulary, merges
