"""Anthropic's Python client through smg."""

from __future__ import annotations

from typing import Any

import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.gateway.sdk import anthropic
from tests.e2e.gateway.smg import Gateway
from tests.e2e.gateway.worker import Worker

ASK: dict[str, Any] = {
    "model": "storyteller", "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "Once upon a time there was a little girl named Lily."}],
}


@pytest.fixture
def client(gate: Gateway) -> Any:
    return anthropic().Anthropic(base_url=gate.url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("stream", [True, False])
def test_messages_equal_inference_service(worker: Worker, client: Any, stream: bool) -> None:
    count = worker.count()
    if stream:
        with client.messages.stream(**ASK, max_tokens=40) as parts:
            found = parts.get_final_message()
    else:
        found = client.messages.create(**ASK, max_tokens=40)
    expected = worker.answer(worker.wait_for(count + 1), 40)
    assert "".join(block.text for block in found.content) == expected.text
    assert found.stop_reason == "max_tokens"
    usage = expected.finish.usage
    assert (found.usage.input_tokens, found.usage.output_tokens) == (usage.prompt_tokens, usage.generated_tokens)


def test_messages_stop_at_a_stop_sequence(worker: Worker, client: Any) -> None:
    count = worker.count()
    found = client.messages.create(**ASK, max_tokens=200, stop_sequences=[". "])
    expected = worker.answer(worker.wait_for(count + 1), 200, stop=[". "])
    assert expected.finish.reason == pb.FINISH_REASON_STOP_STRING
    assert "".join(block.text for block in found.content) == expected.text
    assert found.stop_reason == "stop_sequence"
    assert found.usage.output_tokens == expected.finish.usage.generated_tokens
