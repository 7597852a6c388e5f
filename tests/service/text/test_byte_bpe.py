"""Tokenizers built from vocab.json and merges.txt, compared with trained ones of the library `tokenizers`."""

from __future__ import annotations

import functools
import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import AddedToken

from npuserve.service.text import byte_bpe
from npuserve.service.text.fast_tokenizer import FastTokenizer
from tests.support.real_models import model_folder
from tests.support.tokenizers import CORPUS, texts, train

CLASSES = ["Qwen2Tokenizer", "GPT2Tokenizer"]


def rebuilt(trained: tokenizers.Tokenizer, name: str, prefix_space: bool = False) -> FastTokenizer:
    """Return a tokenizer built from the vocabulary, the merges and the added tokens of another one."""
    state = json.loads(trained.to_str())
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["model"]["merges"]]
    flags = ("content", "special", "normalized", "lstrip", "rstrip", "single_word")
    added = {t["id"]: AddedToken(**{f: t[f] for f in flags}) for t in state["added_tokens"]}
    return FastTokenizer(byte_bpe.build(name, state["model"]["vocab"], merges, added, prefix_space=prefix_space))


@functools.cache
def both(name: str) -> tuple[tokenizers.Tokenizer, FastTokenizer]:
    trained = train(name)
    return trained, rebuilt(trained, name)


@pytest.mark.parametrize("name", CLASSES)
def test_build_equals_tokenizers_on_the_corpus(name: str) -> None:
    trained, ours = both(name)
    for text in [CORPUS, *CORPUS.splitlines(), *CORPUS.split(" "), "", " ", "\n", "a" * 3000, " " * 3000 + "x"]:
        expected = trained.encode(text).ids
        assert ours.encode(text, True) == expected
        assert ours.decode(expected, False) == trained.decode(expected, skip_special_tokens=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_build_equals_tokenizers_on_any_text(name: str, text: str) -> None:
    trained, ours = both(name)
    ids = trained.encode(text).ids
    assert ours.encode(text, False) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == trained.decode(ids, skip_special_tokens=skip)
        # Every other id ends inside characters.
        assert ours.decode(ids[::2], skip) == trained.decode(ids[::2], skip_special_tokens=skip)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_build_splits_every_character_as_tokenizers(name: str) -> None:
    """Each assigned character is tested beside a letter, a number, a space and a newline. In the large uniform blocks
    (CJK, Hangul, Tangut) every 61st character is tested."""
    trained, ours = both(name)
    codes = [*range(0x3400), *range(0x3400, 0xD800, 61), *range(0xE000, 0x17000), *range(0x17000, 0x19000, 61)]
    codes += [*range(0x19000, 0x20000), *range(0x20000, 0x110000, 61)]
    assigned = [c for c in map(chr, codes) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    for start in range(0, len(assigned), 4000):
        text = "\x01".join(f"a{c}a0{c}0 {c}\n{c}'{c}" for c in assigned[start : start + 4000])
        words, position = [], 0
        for _, span in ours._tokenizer.pre_tokenizer.pre_tokenize_str(text):
            assert span[0] == position
            words.append(span)
            position = span[1]
        assert position == len(text)
        assert words == [span for _, span in trained.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("flags", [
    {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized": True},
    {"normalized": True, "special": False, "lstrip": True},
])
def test_build_keeps_the_flags_of_added_tokens(flags: dict[str, bool]) -> None:
    trained = train()
    flags = {"normalized": False, **flags}
    trained.add_tokens([AddedToken(content, **flags) for content in ("MASK", "MASKED", "e\u0301T")])
    ours = rebuilt(trained, "Qwen2Tokenizer")
    for text in [
        "MASK", "a MASK b", "a \n MASK \t b", "aMASKb", "MASKED MASK", "MASKMASK  MASKED", "MASKE", " MASK", "MASK ",
        "x éT e\u0301T y", "<|im_end|>  MASK  <|im_end|>", "MASK.MASK_MASK", "éMASK", "MASK MASK  MASK",
    ]:
        assert ours.encode(text, False) == trained.encode(text).ids, text


def test_build_with_prefix_space_equals_tokenizers() -> None:
    trained = train("GPT2Tokenizer")
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    ours = rebuilt(trained, "GPT2Tokenizer", prefix_space=True)
    for text in ["once", " once", "\nonce", "<|im_end|>once<|im_end|> upon", ""]:
        assert ours.encode(text, False) == trained.encode(text).ids


def test_build_with_head_and_tail_adds_their_ids() -> None:
    added = {7: AddedToken("<s>", special=True, normalized=False)}
    built = byte_bpe.build(
        "GPT2Tokenizer", {"a": 0, "b": 1, "ab": 2}, [("a", "b")], added, head=[7], tail=[7, 7])
    ours = FastTokenizer(built)
    assert ours.encode("ab", True) == [7, 2, 7, 7]
    assert ours.encode("ab", False) == [2]
    assert (ours.vocabulary_size, ours.special_ids, ours.token(2), ours.token(5)) == (8, {7}, "ab", None)
    assert (ours.id_of("<s>"), ours.id_of("c")) == (7, None)


def test_renamed_with_gaps_in_the_ids_keeps_the_ids() -> None:
    added = {9: AddedToken("<s>", special=True, normalized=False), 7: AddedToken("<t>", normalized=False)}
    ours = FastTokenizer(byte_bpe.build("GPT2Tokenizer", {"a": 0, "b": 4, "ab": 5, "<": 6}, [("a", "b")], added), 10)
    renamed = ours.renamed({"<s>": "NAME"})
    assert renamed
    for text in ("aabb", "b<t>a"):
        assert renamed.encode(text, False) == ours.encode(text, False)
    assert renamed.encode("bNAMEab<s>", False) == [4, 9, 5, 6]
    assert ours.encode("b<s>", False) == [4, 9]


def test_build_merges_by_rank_then_leftmost_first() -> None:
    vocabulary = {"a": 0, "b": 1, "aa": 2, "ab": 3, "aab": 4}
    ours = FastTokenizer(byte_bpe.build("Qwen2Tokenizer", vocabulary, [("a", "a"), ("a", "b"), ("aa", "b")]))
    assert ours.encode("aaaab", False) == [2, 4]
    assert ours.encode("aaa", False) == [2, 0]


def test_encode_of_long_runs_is_not_quadratic() -> None:
    """With a quadratic merge loop, 100,000 letters or spaces would take minutes and time out."""
    trained, ours = both("Qwen2Tokenizer")
    for text in ["a" * 100_000, " " * 100_000, " " * 100_000 + "a", "=" * 50_000, "\n" * 50_000]:
        assert ours.encode(text, False) == trained.encode(text).ids


def test_byte_characters_equal_those_of_tokenizers() -> None:
    assert sorted(byte_bpe.byte_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    decoder = tokenizers.decoders.ByteLevel()
    for text in ["é", "é x", "你", "Ġa", "abc", ""]:
        assert byte_bpe.token_bytes(text).decode("utf-8", "replace") == decoder.decode([text])


def test_build_with_a_merge_outside_the_vocabulary_names_the_file() -> None:
    with pytest.raises(ValueError, match=r"^merges.txt: merge 'a' 'c': 'c' is not in the vocabulary"):
        byte_bpe.build("Qwen2Tokenizer", {"a": 0}, [("a", "c")])


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_build_with_an_id_out_of_range_names_the_file(token_id: int) -> None:
    with pytest.raises(ValueError, match=r"^vocab.json and the added tokens: an id must be in \[0, 4294967295\]"):
        byte_bpe.build("Qwen2Tokenizer", {"a": 0}, [], {token_id: AddedToken("<s>")})


@pytest.mark.parametrize(("vocabulary", "merges", "message"), [
    ("[1]", "a b", "vocab.json: must be an object"),
    ("{", "a b", "vocab.json: "),
    ('{"\xff": 0}', "a b", "vocab.json: 'utf-8' codec"),
    ('{"a": -1}', "a b", "vocab.json: must be an object from token to id"),
    ('{"a": 0}', "#version: 0.2\na b c", "merges.txt, line 2: must be two tokens"),
    ('{"a": 0}', "\xff", "merges.txt: 'utf-8' codec"),
])
def test_read_vocabulary_names_the_malformed_file(tmp_path: Path, vocabulary: str, merges: str, message: str) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary, encoding="latin-1")
    (tmp_path / "merges.txt").write_text(merges, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        byte_bpe.read_vocabulary(tmp_path)


@pytest.mark.model
def test_build_equals_the_real_qwen3() -> None:
    trained = tokenizers.Tokenizer.from_file(str(model_folder("../tokenizers/qwen3") / "tokenizer.json"))
    ours = rebuilt(trained, "Qwen2Tokenizer")

    @settings(max_examples=300, deadline=None)
    @given(text=texts)
    def equal(text: str) -> None:
        ids = trained.encode(text).ids
        assert ours.encode(text, True) == ids
        assert ours.decode(ids, True) == trained.decode(ids, skip_special_tokens=True)

    equal()
    for text in [CORPUS, "a" * 20_000, " " * 20_000 + "x"]:
        assert ours.encode(text, True) == trained.encode(text).ids
