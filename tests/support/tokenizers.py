"""Small tokenizers trained by the library `tokenizers`, folders of their files, and loading of these folders."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from npuserve.service.text.tokenizer import Tokenizer
from npuserve.service.text.tokenizer_loader import load_tokenizer

CORPUS = (
    "Once upon a time there was a little girl named Lily. She didn't like to play; they'll say \"I'VE been there\".\n\n"
    "def f(x):\n\treturn x ** 2  # 1234567890\r\n\r\n    if x != 3:   \n"
    "今天天气很好，我们去公园玩。日本語のテキスト、カタカナ。한국어 문장입니다. مرحبا بالعالم שלום עולם "
    "नमस्ते दुनिया ไทย\n"
    "e\u0301 é ñ n\u0303 ö Å Ａ１ ① Ⅷ ½ ² ٣ ३ 三 〇 ß ſ ﬁ Ǆ ʰ 'ſ 'S 'Ll 'rE 'vE 'M 'D 'T don't DON'T l'été\n"
    "👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ☃️ ∑∫≠ — … “quoted” ¡! ?? "
    "!!! --- === ... a\u00a0b\u2003c\u3000d\u200be\u0085f\u2028g\x1ch\x0bi\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(split: str = "Qwen2Tokenizer", vocabulary: int = 700) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer with the settings of the tokenizer class `split`."""
    trained = tokenizers.Tokenizer(models.BPE())
    if split == "Qwen2Tokenizer":
        trained.normalizer = normalizers.NFC()
        trained.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    else:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([CORPUS] * 3, trainer)
    trained.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    trained.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return trained


def train_byte_fallback(vocabulary: int = 400) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama's: ▁ for spaces, byte tokens for unknown characters, <s> before the text."""
    trained = tokenizers.Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=tokens, show_progress=False)
    trained.train_from_iterator(["once upon a time there was a little girl named lily. they play all day"] * 9, trainer)
    # Only <unk>, <s> and </s> are added tokens; the trainer adds the byte tokens too.
    state = json.loads(trained.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    trained = tokenizers.Tokenizer.from_str(json.dumps(state))
    trained.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return trained


def save(
    folder: Path,
    trained: tokenizers.Tokenizer,
    config: Mapping[str, Any] | None = None,
    files: str = "tokenizer.json",
) -> Path:
    """Write tokenizer.json, or vocab.json and merges.txt (files="vocab"), and tokenizer_config.json to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == "vocab":
        trained.model.save(str(folder))
    else:
        trained.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder that has one."""
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def transformers_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder by transformers, as a reference; skip the test if it is not installed."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def added_tokens_decoder(trained: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the field added_tokens_decoder of tokenizer_config.json for a tokenizer."""
    flags = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {str(i): {f: getattr(t, f) for f in flags} for i, t in trained.get_added_tokens_decoder().items()}


# Characters of Unicode 3.2, which have the same properties in all later versions: the libraries' versions differ.
_old = [c for c in map(chr, range(0x30000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]
_odd = list(" \t\r\n'\u00a0\u0085\u2003\u3000\u200b\u200d\ufe0fſsStTrReEvVmMlLdDK０１½Ⅷ三\u0301\u0323\u1161\uac00é")
_odd += list("😀👩🏽🇩🇪,.!-<|>_")
_parts = [*SPECIAL, "<think>", "  ", "\r\n", " '", "'ll", "'S", "\n\n", "Once upon", "天气", "👩‍👧", *_odd]
_piece = st.sampled_from(_parts) | st.sampled_from(_old) | st.text(st.sampled_from(_odd), max_size=6)
texts = st.lists(_piece, max_size=25).map("".join)
