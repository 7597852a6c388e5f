"""Incremental decoders whose text is that of a window of tokens, for decoders of other shapes than Llama's."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models

from npuserve.service.text.fast_tokenizer import FastTokenizer
from npuserve.service.text.incremental_decoder import WindowStream
from npuserve.service.text.tokenizer import Tokenizer

BYTE_FALLBACKS = {
    # transformers writes this one for a Llama that it reads from GGUF.
    "strip": [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)],
    "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
}


def byte_fallback(steps: list[decoders.Decoder]) -> Tokenizer:
    """Return a tokenizer of the 256 byte tokens and a few words."""
    words = [*(f"<0x{b:02X}>" for b in range(256)), "▁once", "▁", "a"]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(steps)
    return Tokenizer(FastTokenizer(made))


def added_text(made: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    stream = made.text_stream(prompt)
    assert isinstance(stream, WindowStream)
    pieces = [piece for i in answer for piece in stream.feed(i)]
    assert len(pieces) == len(answer)
    return "".join(piece.text for piece in pieces) + stream.flush()[1]


TEXTS = {"Chinese": "你好天气很好" * 9, "emoji": "👩‍👩‍👧‍👦🇩🇪" * 5, "French": "né" * 30, "mixed": "a你é👩" * 12}


@pytest.mark.parametrize("steps", BYTE_FALLBACKS.values(), ids=BYTE_FALLBACKS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_window_stream_decodes_a_long_run_of_byte_tokens(steps: list[decoders.Decoder], text: str) -> None:
    made = byte_fallback(steps)
    once, *_ = words = [256, 257, 258]
    for ids in (list(text.encode()), [once, *text.encode(), *words]):
        assert made.decode(ids).endswith(text + (" once a" if once in ids else ""))
        assert added_text(made, [], ids) == made.decode(ids)
        for cut in range(len(text)):
            at = len(text[:cut].encode()) + (once in ids)
            assert made.decode(ids[:at]) + added_text(made, ids[:at], ids[at:]) == made.decode(ids)


@pytest.mark.parametrize("steps", BYTE_FALLBACKS.values(), ids=BYTE_FALLBACKS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_window_stream_after_a_prompt_that_ends_inside_a_character(steps: list[decoders.Decoder], text: str) -> None:
    """The answer has its whole characters, without the rest of the prompt's last one."""
    made, ids = byte_fallback(steps), list(text.encode())
    for cut in range(len(ids)):
        assert added_text(made, ids[:cut], ids[cut:]) == bytes(ids[cut:]).decode(errors="ignore")
