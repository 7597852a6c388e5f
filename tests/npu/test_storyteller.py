"""Built-in model: size, architecture and quality of its stories."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.quality.train_storyteller import loops
from npuserve.npu.storyteller import FOLDER


def test_storyteller_is_small_and_bf16() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_loops_detects_repetition() -> None:
    once = "one two three four five six seven eight nine ten"
    assert not loops(f"{once} and {once}")
    assert loops(f"{once} and {once} and {once}")
    assert loops("no " * 10)
    assert not loops("")


@pytest.mark.full
def test_storyteller_samples_do_not_loop() -> None:
    """20 samples at temperature 1 are stories of English words of some length."""
    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER)
    torch.manual_seed(1)
    start = torch.tensor([tokenizer.encode("Once upon a time")] * 20)
    with torch.inference_mode():
        made = model.float().generate(start, attention_mask=torch.ones_like(start), max_new_tokens=200, do_sample=True)
    stories = [tokenizer.decode(row, skip_special_tokens=True) for row in made]
    assert not [story for story in stories if loops(story)]
    assert all(len(story.split()) > 40 for story in stories)
    assert len(set(stories)) == 20
