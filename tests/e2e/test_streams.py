"""Streamed text equals the unary answer and the tokenizer's own decoding, for any tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import grpc
import pytest
from transformers import AutoTokenizer

from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2
from tests.e2e.server import Server, request, serving, streamed
from tests.support.real_models import BUILT_IN, model_folder, published


@pytest.fixture(scope="module")
def storyteller() -> Iterator[Server]:
    with serving("--dtype", "float32", "--max-num-batched-tokens", "64") as server:
        yield server


tokenizer_of = cache(AutoTokenizer.from_pretrained)


def agree(server: Server, folder: Path, ask: pb.GenerateRequest) -> str:
    """Check that stream, unary call and tokenizer give the same text, and return it."""
    text, ids, finish = streamed(server.stub, ask)
    whole = server.stub.Generate(ask)
    assert whole.text == text
    assert list(whole.token_ids) == ids
    assert whole.finish.reason == finish.reason
    decoded = tokenizer_of(folder).decode(
        ids, skip_special_tokens=ask.output.skip_special_tokens or not ask.output.HasField("skip_special_tokens"),
        clean_up_tokenization_spaces=False)
    assert text.lstrip(" ") == decoded.lstrip(" ")
    return text


def test_any_tokens(storyteller: Server) -> None:
    """At temperature 100 nearly all tokens are equally likely: single bytes, parts of characters."""
    asks = [request("Once", 60, temperature=100.0, seed=seed, ignore_eos=True, skip_special_tokens=seed % 2 == 0)
            for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(lambda ask: agree(storyteller, FOLDER, ask), asks))
    assert any("�" in text for text in texts)


def test_characters_of_several_tokens(storyteller: Server) -> None:
    """Only the bytes of these characters are allowed, one token per byte. The bias is higher for earlier bytes, and the
    penalty removes it from sampled bytes, so that a whole character comes first."""
    tokenizer = tokenizer_of(FOLDER)
    for character in ("é", "中", "😀"):
        pieces = tokenizer.encode(character, add_special_tokens=False)
        assert len(pieces) == len(character.encode())
        text = agree(storyteller, FOLDER, request(
            "Hi", 80, allowed_token_ids=sorted(pieces), ignore_eos=True, repetition_penalty=100.0,
            logit_bias={piece: 100.0 - 20.0 * place for place, piece in enumerate(pieces)}))
        assert text.startswith(character)


def test_prompts_in_many_scripts(storyteller: Server) -> None:
    prompts = ("中文提示", "\U0001f469\u200d\U0001f469\u200d\U0001f467 family", "e\u0301 combining", "العربية",
               "\U0001f1eb\U0001f1f7", "  two  spaces \n\n\t")
    for prompt in prompts:
        agree(storyteller, FOLDER, request(prompt, 16))


@pytest.mark.parametrize("name", [BUILT_IN, *published("stories260K", "minimind2-small")])
def test_byte_fallback_and_chinese(storyteller: Server, name: str) -> None:
    folder = model_folder(name)
    shared = contextlib.nullcontext(storyteller) if name == BUILT_IN else serving(str(folder), "--dtype", "float32")
    with shared as server:
        for seed, prompt in enumerate(("中国的首都", "Once upon a time", "😀😀", "<0xE4><0xB8>")):
            agree(server, folder, request(prompt, 48, temperature=100.0, seed=seed, ignore_eos=True))
            agree(server, folder, request(prompt, 48, temperature=1.2, seed=seed))


def test_stop_strings_end_both_alike(storyteller: Server) -> None:
    for stop, include in ((["Lily"], False), ([" was", "named"], True), (["e"], False), (["zzz", "\n"], False)):
        ask = request("Once upon a time", 64, stop=stop, include_stop=include)
        text, ids, finish = streamed(storyteller.stub, ask)
        whole = storyteller.stub.Generate(ask)
        assert (whole.text, list(whole.token_ids)) == (text, ids)
        if finish.reason == pb.FINISH_REASON_STOP_STRING:
            assert finish.matched_stop in stop
            assert text.endswith(finish.matched_stop) == include
        free, _, _ = streamed(storyteller.stub, request("Once upon a time", 64))
        found = [free.find(s) for s in stop if s in free]
        assert (finish.reason == pb.FINISH_REASON_STOP_STRING) == bool(found)
        assert free.startswith(text)


def test_logprobs_belong_to_their_tokens(storyteller: Server) -> None:
    ask = request("Once upon a time", 12, logprobs=3, prompt_logprobs=2, temperature=0.7, seed=1)
    parts = list(storyteller.stub.StreamGenerate(ask))
    for part in parts:
        assert [p.chosen.token_id for p in part.logprobs] == list(part.token_ids)
        assert all(len(p.top) == 3 and p.top[0].logprob >= p.top[1].logprob for p in part.logprobs)
        assert all(p.chosen.logprob <= p.top[0].logprob for p in part.logprobs)
    prompt_ids = tokenizer_of(FOLDER).encode("Once upon a time")
    prompt = parts[0].prompt_logprobs
    assert [p.chosen.token_id for p in prompt] == prompt_ids
    assert not prompt[0].top
    assert all(len(p.top) == 2 for p in prompt[1:])
    whole = storyteller.stub.Generate(ask)
    assert list(whole.logprobs) == [p for part in parts for p in part.logprobs]
    assert list(whole.prompt_logprobs) == list(prompt)


def test_timing_adds_up(storyteller: Server) -> None:
    timing = storyteller.stub.Generate(request([5] * 150, 8, ignore_eos=True)).finish.timing
    chunks = [c.ToNanoseconds() for c in timing.prefill_chunks]
    assert len(chunks) == 3
    phases = timing.queue.ToNanoseconds() + sum(chunks) + timing.decode.ToNanoseconds() + timing.finish.ToNanoseconds()
    assert abs(phases - timing.total.ToNanoseconds()) < 1_000_000
    assert timing.of_which_device.ToNanoseconds() <= sum(chunks) + timing.decode.ToNanoseconds()


def test_missing_chat_template_is_failed_precondition(storyteller: Server) -> None:
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="hi")])
    with pytest.raises(grpc.RpcError) as failed:
        storyteller.stub.Generate(pb.GenerateRequest(chat=chat))
    assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "chat" in failed.value.details()
