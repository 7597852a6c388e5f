"""Embed and Rank over a fake engine, whose embedding is the ids of the prompt and whose score is its length."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from tokenizers import Tokenizer, processors

from npuserve.service.errors import QueueFull, to_wire
from npuserve.service.ipc.messages import PoolingParams, Submit
from npuserve.v1 import admin_service_pb2, generate_pb2, model_pb2, pooling_pb2
from tests.service.frontend.test_inference import metric
from tests.support.fake_engine import EOS, INFO, make_folder, until
from tests.support.front_end import Running, ask, running
from tests.support.pooling import embeds, ranks, write

TEMPLATE = """{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}[{% for m in messages
if m.role == 'query' %}{{ m.content }}{% endfor %}|{% for m in messages if m.role == 'document' %}{{ m.content
}}{% endfor %}]"""
EMBED = msgspec.structs.replace(INFO, task="embed", embedding_dimension=32)
RANK = msgspec.structs.replace(INFO, task="rank")


def embed(text: str = "ab", **fields: Any) -> pooling_pb2.EmbedRequest:
    if "token_ids" in fields:
        ids = fields.pop("token_ids")
        return pooling_pb2.EmbedRequest(token_ids={"ids": ids}, **fields)
    return pooling_pb2.EmbedRequest(text=text, **fields)


def rank(query: str, *documents: str, **fields: Any) -> pooling_pb2.RankRequest:
    return pooling_pb2.RankRequest(query=query, documents=documents, **fields)


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """Folder of an embedding model whose tokenizer adds a token before and two after a text."""
    folder = embeds(make_folder(tmp_path / "embedder"), prompts={"query": "q:", "document": ""})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s1> $A <s2> <eos>", special_tokens=[("<s1>", 298), ("<s2>", 299), ("<eos>", EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def reranker(tmp_path: Path) -> Path:
    folder = ranks(make_folder(tmp_path / "reranker"), 7, 3, "find:")
    write(folder, "tokenizer_config.json", {**json.loads((folder / "tokenizer_config.json").read_text()),
                                            "chat_template": TEMPLATE})
    return folder


def text_of(ids: list[int]) -> str:
    """Return the text of ids of letters, and of the signs of the template."""
    signs = {i: sign for sign in "[]|:" for i in [_id(sign)]}
    return "".join(signs.get(i) or chr(ord("a") + i) for i in ids)


def _id(sign: str) -> int:
    from tokenizers import pre_tokenizers

    return 26 + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("abcdefghijklmnopqrstuvwxyz")).index(sign)


def prompts(server: Running) -> list[list[int]]:
    return [submit.request.prompt_ids for submit in server.engine.got(Submit)]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def test_embedding_of_a_text_has_prompt_and_special_tokens(embedder: Path) -> None:
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        assert list((await server.inference.Embed(embed("ab"))).values) == [298, 0, 1, 299, EOS]
        asked = embed("ab", prompt_name="query", dimensions=8, normalize=False)
        answer = await server.inference.Embed(asked)
        assert list(answer.values) == [298, 16, _id(":"), 0, 1, 299, EOS]
        assert answer.usage == generate_pb2.Usage(prompt_tokens=7, cached_tokens=3)
        assert list((await server.inference.Embed(embed(token_ids=[5, 6]))).values) == [5, 6]
        requests = [submit.request for submit in server.engine.got(Submit)]
        assert [request.pooling for request in requests] == [
            PoolingParams(32, True), PoolingParams(8, False), PoolingParams(32, True)]
        assert [request.max_tokens for request in requests] == [0, 0, 0]


async def _reconnected(server: Running) -> None:
    """Wait until the front end has the engine's `info`."""
    await server.engine.die()
    server.engine.start()
    await until(lambda: server.frontend._engine.state == "ready"
                and server.frontend._engine.model_info == server.engine.info)


@pytest.mark.slow
@pytest.mark.parametrize(("message", "error"), [
    (embed(""), "text: must be at least one token, got an empty input"),
    (embed(token_ids=[]), "token_ids: must be at least one token, got an empty input"),
    (embed(token_ids=[300]), "token_ids.ids[0]: token id must be in [0, 299], got 300"),
    (embed(token_ids=[1] * 63 + [300]), "token_ids.ids[63]: token id must be in [0, 299], got 300"),
    (embed(token_ids=[1], prompt_name="query"), "prompt_name: is for text"),
    (embed(prompt_name="other"), "prompt_name: must be a prompt of the model (document, query), got 'other'"),
    (embed(dimensions=33), "dimensions: must be in [1, 32], got 33"),
    (embed(dimensions=0), "dimensions: must be in [1, 32], got 0"),
    (embed("a" * 62), "text: 65 tokens are too many; must be at most 64 tokens"),
    (embed(token_ids=[1] * 65), "token_ids: 65 tokens are too many; must be at most 64 tokens"),
    (embed(request_id="a b"), "request_id: must be 1 to 128 printable ASCII characters"),
    (embed(scheduling={"priority": -1}), "scheduling.priority: must be in [0, 100], got -1"),
    (pooling_pb2.EmbedRequest(), "input: one of text and token_ids is needed"),
])
async def test_embed_bad_field_is_refused_by_name(
    embedder: Path, message: pooling_pb2.EmbedRequest, error: str
) -> None:
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        code, details = await refusal(server.inference.Embed(message))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(error)
        assert prompts(server) == []


async def test_embedding_of_a_long_input_is_cut_on_request(embedder: Path) -> None:
    """The special tokens stay. A text of many pieces is not tokenized as a whole."""
    write(embedder, "sentence_bert_config.json", {"max_seq_length": 10})
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        whole = [298, 0, 1, 2, 3, 4, 5, 6, 299, EOS]
        assert list((await server.inference.Embed(embed("abcdefg"))).values) == whole
        for text in ("abcdefgh", "abcdefg" + 200_000 * "z"):
            code, details = await refusal(server.inference.Embed(embed(text)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("text: ")
            assert list((await server.inference.Embed(embed(text, truncate=True))).values) == whole
        ids = list(range(20))
        assert list((await server.inference.Embed(embed(token_ids=ids, truncate=True))).values) == ids[:10]


async def test_scores_have_the_order_of_the_documents(reranker: Path) -> None:
    lengths = [random.Random(1).randrange(40) for _ in range(50)]
    async with running(reranker, max_num_seqs=64) as server:
        server.engine.info = msgspec.structs.replace(RANK, max_num_seqs=64)
        server.engine.delay = 0.001
        await _reconnected(server)
        call = server.inference.Rank(rank("abc", *("x" * n for n in lengths), request_id="r"))
        answer = await call
        assert dict(await call.initial_metadata()) == {"x-request-id": "r"}
        assert list(answer.scores) == [len("find:[abc|]") + n for n in lengths]
        assert answer.usage.prompt_tokens == sum(answer.scores)
        requests = [submit.request for submit in server.engine.got(Submit)]
        assert sorted(request.index for request in requests) == list(range(50))
        assert {(request.request_id, request.samples, request.arrival) for request in requests} == {
            ("r", 1, requests[0].arrival)}
        assert server.frontend._engine._streams == {}


async def test_rank_prompt_has_the_instruction_of_the_request(reranker: Path) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        await server.inference.Rank(rank("abc", "xy"))
        await server.inference.Rank(rank("abc", "xy", instruction="code"))
        assert list(map(text_of, prompts(server))) == ["find:[abc|xy]", "code[abc|xy]"]


async def test_rank_special_token_in_a_document_is_plain_text(reranker: Path) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        await server.inference.Rank(rank("abc", "<eos>"))
        ((ids),) = prompts(server)
        assert EOS not in ids
        assert len(ids) == len("find:[abc|<eos>]")


async def test_rank_of_a_folder_without_a_template_for_pairs_is_qwen3s(tmp_path: Path) -> None:
    folder = ranks(make_folder(tmp_path / "plain", chat=False), 7, 3)
    async with running(folder) as server:
        server.engine.info = msgspec.structs.replace(RANK, max_model_len=1024)
        await _reconnected(server)
        await server.inference.Rank(rank("abc", "xy"))
        ((ids),) = prompts(server)
        text = server.frontend._generation.tokenizer.decode(ids)
    assert text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a '
        "web search query, retrieve relevant passages that answer the query\n<Query>: abc\n<Document>: xy<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.slow
@pytest.mark.parametrize(("message", "error"), [
    (rank("", "a"), "query: must not be empty"),
    (rank("a"), "documents: must be 1 to 1024 documents, got 0"),
    (rank("a", "b", "x" * 60), "documents[1]: 69 tokens with the query and the instruction are too many; must be at "
                               "most 64 tokens"),
    (rank("a" * 60, "b", truncate=True), "documents[0]: 69 tokens"),
    (rank("a", "b", request_id="a b"), "request_id: must be 1 to 128 printable ASCII characters"),
])
async def test_rank_bad_field_is_refused_by_name(reranker: Path, message: pooling_pb2.RankRequest, error: str) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        code, details = await refusal(server.inference.Rank(message))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(error)
        assert prompts(server) == []


async def test_rank_long_document_is_cut_on_request(reranker: Path) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        for document in ("x" * 60, "x" * 300_000):
            answer = await server.inference.Rank(rank("abc", "y", document, truncate=True))
            assert list(answer.scores) == [12, 64]
        assert text_of(prompts(server)[1]) == "find:[abc|" + "x" * 53 + "]"


@pytest.mark.slow
async def test_calls_of_other_tasks_are_refused_by_name(embedder: Path, reranker: Path, folder: Path) -> None:
    async def refusals(model: Path) -> list[str]:
        async with running(model) as server:
            calls = [server.inference.Generate(ask("a", 1)), server.inference.Embed(embed()),
                     server.inference.Rank(rank("a", "b"))]
            found = []
            for call in calls:
                try:
                    await call
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                        found.append(error.details())
        return found

    assert await refusals(embedder) == [
        "Generate: the served model 'embedder' is an embedding model; call Embed",
        "Rank: the served model 'embedder' is an embedding model; call Embed"]
    assert await refusals(reranker) == [
        "Generate: the served model 'reranker' is a reranker; call Rank",
        "Embed: the served model 'reranker' is a reranker; call Rank"]
    assert [text.partition(": it has")[0] for text in await refusals(folder)] == [
        f"{call}: the served model {folder.name!r} generates text" for call in ("Embed", "Rank")]


async def test_model_info_names_the_task(embedder: Path, folder: Path) -> None:
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        info = await server.inference.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.task, info.embedding_dimension) == (model_pb2.TASK_EMBED, 32)
    async with running(folder) as server:
        info = await server.inference.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.task, info.embedding_dimension) == (model_pb2.TASK_GENERATE, 0)


async def test_embedding_survives_the_death_of_the_engine(embedder: Path) -> None:
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        server.engine.hold.clear()
        call = server.inference.Embed(embed("ab"))
        await until(lambda: server.engine.live)
        await server.engine.die()
        server.engine.hold.set()
        server.engine.start()
        assert list((await call).values) == [298, 0, 1, 299, EOS]


async def test_cancel_ends_all_documents(reranker: Path) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        server.engine.hold.clear()
        call = server.inference.Rank(rank("a", "b", "c", "d"))
        await until(lambda: server.engine.live == 3)
        call.cancel()
        await until(lambda: not server.engine.live)
        assert server.frontend._engine._streams == {}


async def test_abort_ends_a_call_with_aborted(reranker: Path) -> None:
    async with running(reranker, administrator=True) as server:
        server.engine.info = RANK
        await _reconnected(server)
        server.engine.hold.clear()
        call = server.inference.Rank(rank("a", "b", "c", request_id="r"))
        await until(lambda: server.engine.live == 2)
        await server.admin.Abort(admin_service_pb2.AbortRequest(request_id="r"))
        assert await refusal(call) == (grpc.StatusCode.ABORTED, "the request was aborted")
        await until(lambda: not server.engine.live)


async def test_first_document_decides_and_later_ones_wait_for_a_place(reranker: Path) -> None:
    async with running(reranker) as server:
        server.engine.info = RANK
        await _reconnected(server)
        server.engine.refuse = to_wire(QueueFull("queue full: test", 0.01))
        server.engine.refuse_index = 0
        assert (await refusal(server.inference.Rank(rank("a", "b", "c"))))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        server.engine.refuse_index = 1
        call = server.inference.Rank(rank("a", "b", "cd"))
        await until(lambda: len([s for s in server.engine.got(Submit) if s.request.index == 1]) > 3)
        server.engine.refuse = None
        assert list((await call).scores) == [len("find:[a|b]"), len("find:[a|cd]")]


async def test_embedding_is_in_metrics_and_log(embedder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = metric("request_finish_total", reason="pooled")
    async with running(embedder) as server:
        server.engine.info = EMBED
        await _reconnected(server)
        with caplog.at_level(logging.INFO):
            await server.inference.Embed(embed("ab", request_id="r"))
            await asyncio.sleep(0)
    assert metric("request_finish_total", reason="pooled") == before + 1
    (line,) = [record for record in caplog.records if getattr(record, "fields", {}).get("rpc") == "Embed"]
    assert {key: line.fields[key] for key in ("id", "reason", "prompt_tokens", "cached_tokens", "code")} == {
        "id": "r", "reason": "pooled", "prompt_tokens": 5, "cached_tokens": 3, "code": "OK"}
