"""Errors through smg, and clients that leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.e2e import brittle
from tests.e2e.gateway.sdk import openai, openai_client
from tests.e2e.gateway.smg import Gateway, gateway
from tests.e2e.gateway.worker import LOGGING, Worker
from tests.e2e.processes import until
from tests.e2e.server import serving
from tests.support.vllm_engine import engine_stub, vllm_request

MODEL = "storyteller"
TRIES = 5
"""Tries of smg for one request, by default."""
PROMPT = "Once upon a time"


def complete(gate: Gateway, text: str = PROMPT, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    return openai_client(gate).completions.create(model=MODEL, prompt=text, **fields)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Worker with one seat and one place in the queue, each of whose steps takes 50 ms."""
    file: Path = tmp_path_factory.mktemp("slow") / "slow"
    file.write_text("0.05")
    with serving(
        "--max-num-seqs", "1", "--max-queue", "1", *LOGGING, **brittle.COUNTING,
        process={"env": {**os.environ, brittle.SLOW: str(file)}},
    ) as server:
        yield Worker(server)


@pytest.fixture(scope="module")
def slow_gate(slow: Worker) -> Iterator[Gateway]:
    """Gateway that does not take the worker out for its queue."""
    with gateway([slow.server.target], "--worker-overload-waiting-requests", "1000") as running:
        yield running


def active(worker: Worker) -> int:
    info = engine_stub(worker.server.channel).GetServerInfo(vllm.GetServerInfoRequest())
    return int(info.active_requests)


def test_too_long_a_prompt_is_400(gate: Gateway) -> None:
    with pytest.raises(openai().BadRequestError) as refused:
        complete(gate, PROMPT * 300)
    assert refused.value.status_code == 400


def test_too_many_tokens_beside_the_prompt_are_400_with_the_workers_text(gate: Gateway) -> None:
    with pytest.raises(openai().BadRequestError, match=r"sampling_params.max_tokens: must be in \[1, "):
        complete(gate, max_tokens=511)


def test_a_full_queue_is_429_after_retries(slow: Worker, slow_gate: Gateway) -> None:
    stub = engine_stub(slow.server.channel)
    held = [stub.Generate(vllm_request(PROMPT, 400, ignore_eos=True, stream=True), timeout=60) for _ in range(2)]
    try:
        until(lambda: active(slow) == 2, slow.server)
        count = len(slow.requests())
        with pytest.raises(openai().RateLimitError):
            complete(slow_gate)
        slow.wait_for(count + TRIES)
        assert {line["code"] for line in slow.requests()[count:]} == {"RESOURCE_EXHAUSTED"}
        assert len(slow.requests()) == count + TRIES
    finally:
        for call in held:
            call.cancel()
    until(lambda: active(slow) == 0, slow.server)
    assert complete(slow_gate, max_tokens=2).choices
    slow.wait_for(count + TRIES + len(held) + 1)  # so that the next test sees no line of this one


@pytest.mark.parametrize("tokens_read", [1, 5])
def test_a_client_that_leaves_ends_its_request(slow: Worker, slow_gate: Gateway, tokens_read: int) -> None:
    """smg sends Abort alone. Otherwise 400 tokens would take 20 s."""
    count = len(slow.requests())
    stream = complete(slow_gate, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    for _ in range(tokens_read):
        next(stream)
    stream.response.close()
    line = slow.wait_for(count + 1)
    assert line["reason"] == "aborted"
    assert line["generated_tokens"] < 200
