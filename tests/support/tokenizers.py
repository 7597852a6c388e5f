"""Small tokenizers, trained here by the library `tokenizers`, and folders of them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

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
    """A byte-level BPE with the settings of that tokenizer class."""
    made = tokenizers.Tokenizer(models.BPE())
    if split == "Qwen2Tokenizer":
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([CORPUS] * 3, trainer)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return made


def train_byte_fallback(vocabulary: int = 400) -> tokenizers.Tokenizer:
    """A Llama-like tokenizer: ▁ for spaces, a byte token for what the vocabulary lacks, <s> before the text."""
    made = tokenizers.Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=tokens, show_progress=False)
    made.train_from_iterator(["once upon a time there was a little girl named lily. they play all day"] * 9, trainer)
    # Only <unk>, <s> and </s> are to be added tokens.
    state = json.loads(made.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def save(
    folder: Path,
    made: tokenizers.Tokenizer,
    config: Mapping[str, Any] | None = None,
    files: str = "tokenizer.json",
) -> Path:
    """A folder with tokenizer.json, or with vocab.json and merges.txt (files="vocab"), and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == "vocab":
        made.model.save(str(folder))
    else:
        made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def added_tokens_decoder(made: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    flags = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {str(i): {f: getattr(t, f) for f in flags} for i, t in made.get_added_tokens_decoder().items()}


# Characters that Unicode 3.2 knew, whose properties no table has changed since: the libraries' tables differ in age.
_old = [c for c in map(chr, range(0x30000)) if unicodedata.ucd_3_2_0.category(c) not in ("Cn", "Cs", "Co")]
_odd = list(" \t\r\n'\u00a0\u0085\u2003\u3000\u200b\u200d\ufe0fſsStTrReEvVmMlLdDK０１½Ⅷ三\u0301\u0323\u1161\uac00é")
_odd += list("😀👩🏽🇩🇪,.!-<|>_")
_parts = [*SPECIAL, "<think>", "  ", "\r\n", " '", "'ll", "'S", "\n\n", "Once upon", "天气", "👩‍👧", *_odd]
_piece = st.sampled_from(_parts) | st.sampled_from(_old) | st.text(st.sampled_from(_odd), max_size=6)
texts = st.lists(_piece, max_size=25).map("".join)
