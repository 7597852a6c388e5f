"""Vocabularies of real kinds of tokenizers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from npuserve.npu.storyteller import __file__ as storyteller
from npuserve.service.structured_output.compile_process import build_byte_matcher, build_library_matcher
from npuserve.service.structured_output.errors import UnsupportedVocabulary
from npuserve.service.structured_output.matcher import Matcher
from npuserve.service.structured_output.translation.translate import translate
from npuserve.service.structured_output.vocabulary import MAX_TOKEN_BYTES, Vocabulary, VocabularyData
from npuserve.service.text.fast_tokenizer import FastTokenizer
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.service.text.tokenizer_loader import load_tokenizer
from tests.support.tokenizers import train, train_byte_fallback

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
          "required": ["name", "n"], "additionalProperties": False}
TEXTS = ['{"name": "Zoë 日本", "n": 12}', '{"name":"a\\n","n":-3}']


def built_in() -> Tokenizer:
    loaded = load_tokenizer(Path(storyteller).parent / "model")
    assert loaded
    return loaded


KINDS = {"byte-level": lambda: Tokenizer(FastTokenizer(train())),
         "byte fallback": lambda: Tokenizer(FastTokenizer(train_byte_fallback())), "built-in": built_in}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = KINDS[request.param]()
    return made


def state(vocabulary: Vocabulary) -> Matcher:
    grammar = translate("json_schema", json.dumps(SCHEMA), vocabulary.data.special)
    return Matcher(vocabulary, build_library_matcher(vocabulary.library, grammar, "json_schema"))


def test_bytes_of_tokens_are_the_text(tokenizer: Tokenizer):
    tokens = tokenizer.token_bytes()
    assert tokens is not None
    assert len(tokens) == tokenizer.vocabulary_size
    for text in [*TEXTS, "x = [1, 2]\n\ty  z"]:
        found = b"".join(tokens[i] for i in tokenizer.encode(text, add_special_tokens=False))
        assert found.decode().removeprefix(" ") == text


def test_answers_decode_to_valid_texts(tokenizer: Tokenizer):
    end = max(tokenizer.special_ids)
    size = tokenizer.vocabulary_size + 5
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, [end])
    rng = random.Random(4)
    bits = np.zeros(-(-size // 32), np.uint32)
    ended = 0
    for _ in range(10):
        matcher, ids = state(vocabulary), list[int]()
        for _ in range(120):
            matcher.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            assert len(allowed)
            assert allowed[-1] < tokenizer.vocabulary_size
            token = int(end if end in allowed else rng.choice(allowed))
            assert matcher.advance(token)
            if token == end:
                ended += 1
                answer = json.loads(tokenizer.decode(ids))
                assert set(answer) == {"name", "n"}
                break
            assert token not in tokenizer.special_ids
            ids.append(token)
    assert ended > 3


def test_forced_tokens_are_the_tokenizers_own(tokenizer: Tokenizer, request: pytest.FixtureRequest):
    vocabulary = Vocabulary.from_tokenizer(tokenizer, tokenizer.vocabulary_size, [max(tokenizer.special_ids)])
    text = "Once upon a time there was a little girl"
    grammar = translate("choices", json.dumps([text + " a", text + " b"]), {})
    matcher = Matcher(vocabulary, build_library_matcher(vocabulary.library, grammar, "choices"),
                      build_byte_matcher(vocabulary, grammar, "choices"))
    forced = matcher.forced()
    assert forced == tokenizer.encode(text + " ", add_special_tokens=False)[: len(forced)]
    assert (len(forced) > 5) == (request.node.callspec.params["tokenizer"] != "byte fallback")  # adds a space
    for place, token in enumerate(forced):
        assert matcher.forced()[: len(forced) - place] == forced[place:]
        assert matcher.advance(token)


def test_first_token_beyond_the_model_is_unknown():
    data = VocabularyData([b"a", b"b", b""], {"<end>": 2}, [2])
    vocabulary = Vocabulary(data, lambda text: [1] if text == "b" else [3])
    assert (vocabulary.first_token(b"b"), vocabulary.first_token(b"ab")) == (1, None)


def test_first_token_is_unknown_if_the_following_text_may_change_it():
    tokens = [b"bcd", b"x", b"ab", b"a", b"b", b""]
    vocabulary = Vocabulary(VocabularyData(tokens, {"<end>": 5}, [5]), lambda text: [tokens.index(text[:2].encode())])
    assert vocabulary.first_token(b"abx") == 2
    for text in (b"ab", b"abc"):  # "bcd" may follow "a"
        assert vocabulary.first_token(text) is None
    assert vocabulary.first_token(b"x") == 1
    assert vocabulary.first_token(b"a") is None  # "ab" may follow


def test_first_token_of_other_text_is_unknown():
    vocabulary = Vocabulary(VocabularyData([b" a", b"a", b""], {"<end>": 2}, [2]), lambda text: [0] if text else [])
    assert vocabulary.first_token(b" a") == 0
    for text in (b"a", b"ax"):
        assert vocabulary.first_token(text) is None  # the tokenizer adds a space
    assert vocabulary.first_token(b"\xe6") is None  # no character, and so no token


def test_first_token_is_no_special_token():
    made = Tokenizer(FastTokenizer(train()))
    vocabulary = Vocabulary.from_tokenizer(made, made.vocabulary_size, [max(made.special_ids)])
    [special] = made.encode("<|im_end|>", add_special_tokens=False)
    assert special in vocabulary.special_ids
    assert vocabulary.first_token(b"<|im_end|>") is None


def test_model_may_have_fewer_ids_than_the_tokenizer():
    made = Tokenizer(FastTokenizer(train()))
    first = min(made.special_ids)
    for size in (first, first + 1):
        vocabulary = Vocabulary.from_tokenizer(made, size, [0, *made.special_ids])
        assert (vocabulary.size, len(vocabulary.data.tokens)) == (size, size)
        assert sorted(vocabulary.end_ids) == [0, *range(first, size)]
        assert sorted(vocabulary.data.special.values()) == [*range(first, size)]


@pytest.mark.parametrize("size", [31, 32, 33])
def test_other_tokens_begin_with_another_byte_or_are_no_text(size: int):
    tokens = [*[bytes([ord("a") + i % 3]) * (1 + i % 2) for i in range(size - 1)], b""]
    mask = Vocabulary(VocabularyData(tokens, {"<end>": size - 1}, [size - 1])).other_tokens(ord("b"))
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-size // 32),))
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [i for i in range(size) if tokens[i][:1] != b"b"]


def test_token_that_is_too_long_for_the_library_is_not_allowed():
    tokens = [b"a", b"b" * MAX_TOKEN_BYTES, b"b" * (MAX_TOKEN_BYTES + 1), b""]
    tokenizer = SimpleNamespace(
        is_isolated=False, token_bytes=lambda: tokens, special_ids=[], encode=lambda text, add_special_tokens: [0])
    found = Vocabulary.from_tokenizer(tokenizer, 4, [3])  # type: ignore[arg-type]
    assert found.data.tokens == [*tokens[:2], b"", b""]


def test_tokenizer_in_another_process_forces_no_tokens() -> None:
    tokens = [*(bytes([i]) for i in range(256)), b""]
    tokenizer = SimpleNamespace(token_bytes=lambda: tokens, special_ids=[], encode=None)
    for tokenizer.is_isolated in (True, False):
        vocabulary = Vocabulary.from_tokenizer(tokenizer, 257, [256])  # type: ignore[arg-type]
        assert (vocabulary.bytes is None) is tokenizer.is_isolated


def test_model_without_an_end_token_is_refused():
    with pytest.raises(UnsupportedVocabulary, match="token that ends an answer"):
        Vocabulary(VocabularyData([b"a"], {}, []))
    with pytest.raises(UnsupportedVocabulary, match="token that ends an answer"):
        Vocabulary(VocabularyData([b"a"], {}, [1]))


def test_tokenizer_without_bytes_is_refused():
    inner = train()
    inner.decoder = None
    with pytest.raises(UnsupportedVocabulary, match="byte-level"):
        Vocabulary.from_tokenizer(Tokenizer(FastTokenizer(inner)), 800, [1])
