from __future__ import annotations

import functools
import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings

from npuserve.service.text import byte_bpe
from npuserve.service.text.byte_bpe import GPT2, QWEN2, SPLIT_RULES, AddedToken, ByteBPE
from tests.support.real_models import model_folder
from tests.support.tokenizers import CORPUS, texts, train

CLASSES = ["Qwen2Tokenizer", "GPT2Tokenizer"]


def of_tokenizers(made: tokenizers.Tokenizer, name: str, prefix_space: bool = False) -> ByteBPE:
    state = json.loads(made.to_str())
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["model"]["merges"]]
    flags = ("id", "content", "special", "normalized", "lstrip", "rstrip", "single_word")
    added = [AddedToken(**{f: t[f] for f in flags}) for t in state["added_tokens"]]
    return ByteBPE(state["model"]["vocab"], merges, SPLIT_RULES[name], added, prefix_space=prefix_space)


@functools.cache
def both(name: str) -> tuple[tokenizers.Tokenizer, ByteBPE]:
    made = train(name)
    return made, of_tokenizers(made, name)


@pytest.mark.parametrize("name", CLASSES)
def test_equals_tokenizers_on_the_corpus(name: str) -> None:
    made, ours = both(name)
    for text in [CORPUS, *CORPUS.splitlines(), *CORPUS.split(" "), "", " ", "\n", "a" * 3000, " " * 3000 + "x"]:
        expected = made.encode(text).ids
        assert ours.encode(text, True) == expected
        assert ours.decode(expected, False) == made.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_equals_tokenizers_on_any_text(name: str, text: str) -> None:
    made, ours = both(name)
    ids = made.encode(text).ids
    assert ours.encode(text, False) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == made.decode(ids, skip_special_tokens=skip)
        # Halves of the ids end inside characters.
        assert ours.decode(ids[::2], skip) == made.decode(ids[::2], skip_special_tokens=skip)


@pytest.mark.parametrize("name", CLASSES)
def test_every_character_has_the_class_that_tokenizers_gives_it(name: str) -> None:
    """Each assigned character beside a letter, a number, a space and a newline splits as there. Of the large uniform
    blocks (CJK, Hangul, Tangut) every 61st."""
    made, ours = both(name)
    codes = [*range(0x3400), *range(0x3400, 0xD800, 61), *range(0xE000, 0x17000), *range(0x17000, 0x19000, 61)]
    codes += [*range(0x19000, 0x20000), *range(0x20000, 0x110000, 61)]
    assigned = [c for c in map(chr, codes) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    split = made.pre_tokenizer.pre_tokenize_str
    for start in range(0, len(assigned), 4000):
        text = "\x01".join(f"a{c}a0{c}0 {c}\n{c}'{c}" for c in assigned[start : start + 4000])
        words, position = [], 0
        for match in ours._rule.pattern.finditer(text.translate(ours._classes)):
            assert match.start() == position
            words.append(match.span())
            position = match.end()
        assert position == len(text)
        assert words == [span for _, span in split(text)]


@pytest.mark.parametrize("flags", [
    {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}, {"normalized": True},
    {"normalized": True, "special": False, "lstrip": True},
])
def test_flags_of_added_tokens(flags: dict[str, bool]) -> None:
    made = train()
    flags = {"normalized": False, **flags}
    made.add_tokens([tokenizers.AddedToken(content, **flags) for content in ("MASK", "MASKED", "e\u0301T")])
    ours = of_tokenizers(made, "Qwen2Tokenizer")
    for text in [
        "MASK", "a MASK b", "a \n MASK \t b", "aMASKb", "MASKED MASK", "MASKMASK  MASKED", "MASKE", " MASK", "MASK ",
        "x éT e\u0301T y", "<|im_end|>  MASK  <|im_end|>", "MASK.MASK_MASK", "éMASK", "MASK MASK  MASK",
    ]:
        assert ours.encode(text, False) == made.encode(text).ids, text


def test_prefix_space() -> None:
    made = train("GPT2Tokenizer")
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    ours = of_tokenizers(made, "GPT2Tokenizer", prefix_space=True)
    for text in ["once", " once", "\nonce", "<|im_end|>once<|im_end|> upon", ""]:
        assert ours.encode(text, False) == made.encode(text).ids


def test_head_and_tail() -> None:
    ours = ByteBPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], GPT2, [AddedToken(7, "<s>")], head=[7], tail=[7, 7])
    assert ours.encode("ab", True) == [7, 2, 7, 7]
    assert ours.encode("ab", False) == [2]
    assert (ours.vocabulary_size, ours.special_ids, ours.token(2), ours.token(5)) == (8, {7}, "ab", None)
    assert (ours.id_of("<s>"), ours.id_of("c")) == (7, None)


def test_merges_leftmost_first_and_by_rank() -> None:
    vocabulary = {"a": 0, "b": 1, "aa": 2, "ab": 3, "aab": 4}
    ours = ByteBPE(vocabulary, [("a", "a"), ("a", "b"), ("aa", "b")], QWEN2)
    assert ours.encode("aaaab", False) == [2, 4]
    assert ours.encode("aaa", False) == [2, 0]


def test_long_runs_are_not_quadratic() -> None:
    """100000 letters or spaces: under a quadratic merge this would take minutes, so the test would time out."""
    made, ours = both("Qwen2Tokenizer")
    for text in ["a" * 100_000, " " * 100_000, " " * 100_000 + "a", "=" * 50_000, "\n" * 50_000]:
        assert ours.encode(text, False) == made.encode(text).ids


def test_byte_characters_are_those_of_tokenizers() -> None:
    assert sorted(byte_bpe.byte_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    decoder = tokenizers.decoders.ByteLevel()
    for text in ["é", "é x", "你", "Ġa", "abc", ""]:
        assert byte_bpe.token_bytes(text).decode("utf-8", "replace") == decoder.decode([text])


def test_refuses_a_merge_outside_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="merge 'a' 'c': 'c' is not in the vocabulary"):
        ByteBPE({"a": 0}, [("a", "c")], QWEN2)


@pytest.mark.parametrize(("vocabulary", "merges", "says"), [
    ("[1]", "a b", "vocab.json: must be an object"),
    ('{"a": -1}', "a b", "vocab.json: must be an object from token to id"),
    ('{"a": 0}', "#version: 0.2\na b c", "merges.txt, line 2: must be two tokens"),
])
def test_refuses_bad_files(tmp_path: Path, vocabulary: str, merges: str, says: str) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match=says):
        byte_bpe.read_vocabulary(tmp_path)


@pytest.mark.model
def test_equals_the_real_qwen3() -> None:
    made = tokenizers.Tokenizer.from_file(str(model_folder("../tokenizers/qwen3") / "tokenizer.json"))
    ours = of_tokenizers(made, "Qwen2Tokenizer")

    @settings(max_examples=300, deadline=None)
    @given(text=texts)
    def equal(text: str) -> None:
        ids = made.encode(text).ids
        assert ours.encode(text, True) == ids
        assert ours.decode(ids, True) == made.decode(ids, skip_special_tokens=True)

    equal()
    for text in [CORPUS, "a" * 20_000, " " * 20_000 + "x"]:
        assert ours.encode(text, True) == made.encode(text).ids
