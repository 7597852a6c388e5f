"""OpenAI's Python client through smg: answers equal InferenceService's for the same token ids."""

from __future__ import annotations

from typing import Any

import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.gateway.worker import Worker

PROMPT = "Once upon a time there was a little girl named Lily."
LONG = PROMPT * 8
MODEL = "storyteller"


def chat(client: Any, text: str = PROMPT, max_tokens: int = 40, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=max_tokens, **{"temperature": 0, **fields})


def text_of(stream: Any) -> tuple[str, str, Any]:
    """Return text, finish reason and usage of a chat's stream."""
    text, reason, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


@pytest.mark.parametrize("fields", [
    {}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": -7, "top_p": 0.8},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
], ids=["greedy", "seeded", "negative seed", "penalties"])
def test_chat_equals_inference_service(worker: Worker, client: Any, fields: dict[str, Any]) -> None:
    count = worker.count()
    found = chat(client, **fields)
    line = worker.wait_for(count + 1)
    ours = {**fields, "seed": fields["seed"] % (1 << 64)} if "seed" in fields else fields
    expected = worker.answer(line, 40, **ours)
    (choice,) = found.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    usage = expected.finish.usage
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (usage.prompt_tokens, usage.generated_tokens)
    text, reason, usage = text_of(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert (text, reason, usage.completion_tokens) == (expected.text, "length", 40)


def test_chat_stops_at_a_stop_string(worker: Worker, client: Any) -> None:
    """The worker ends there too: the count of tokens is the same."""
    count = worker.count()
    found = chat(client, max_tokens=200, stop=["zebra", ". "])
    expected = worker.answer(worker.wait_for(count + 1), 200, stop=["zebra", ". "])
    assert expected.finish.reason == pb.FINISH_REASON_STOP_STRING
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (expected.text, "stop")
    assert found.usage.completion_tokens == expected.finish.usage.generated_tokens
    assert worker.requests()[-1]["reason"] == "stop_string"
    text, reason, _ = text_of(chat(client, max_tokens=200, stop=["zebra", ". "], stream=True))
    assert (text, reason) == (expected.text, "stop")


def test_chat_logprobs_equal_inference_service(worker: Worker, client: Any) -> None:
    count = worker.count()
    found = chat(client, max_tokens=8, logprobs=True, top_logprobs=3)
    expected = worker.answer(worker.wait_for(count + 1), 8, logprobs=3)
    tokens = found.choices[0].logprobs.content
    assert [token.logprob for token in tokens] == pytest.approx([p.chosen.logprob for p in expected.logprobs])
    assert [[top.logprob for top in token.top_logprobs] for token in tokens] == [
        pytest.approx([top.logprob for top in p.top]) for p in expected.logprobs]


def test_chat_reports_cached_tokens(client: Any) -> None:
    chat(client, LONG, 4)
    usage = chat(client, LONG, 4).usage
    assert usage.prompt_tokens_details.cached_tokens >= 16
    *_, streamed = text_of(chat(client, LONG, 4, stream=True, stream_options={"include_usage": True}))
    assert streamed.prompt_tokens_details.cached_tokens == usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_chat_with_several_choices(worker: Worker, client: Any, stream: bool) -> None:
    count = worker.count()
    fields = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 20}
    found = chat(client, stream=stream, **fields)
    texts = dict.fromkeys(range(3), "")
    if stream:
        for chunk in found:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = {choice.index: choice.message.content for choice in found.choices}
    line = worker.wait_for(count + 1)
    assert list(texts.values()) == [worker.answer(line, 20, temperature=1.0, seed=5 + i).text for i in range(3)]


def test_completions_equal_inference_service(worker: Worker, client: Any) -> None:
    count = worker.count()
    create = client.completions.create
    found = create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0)
    expected = worker.answer(worker.wait_for(count + 1), 30)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, "length")
    parts = create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text


def test_completions_of_several_prompts(client: Any) -> None:
    prompts = [PROMPT, "The dog", "One day"]
    create = client.completions.create
    found = create(model=MODEL, prompt=prompts, max_tokens=10, temperature=0)
    alone = [create(model=MODEL, prompt=prompt, max_tokens=10, temperature=0).choices[0].text for prompt in prompts]
    assert [choice.text for choice in sorted(found.choices, key=lambda choice: choice.index)] == alone


def test_responses_equal_chat(client: Any) -> None:
    expected = chat(client, max_tokens=30).choices[0].message.content
    found = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=30, temperature=0)
    assert found.output_text == expected
    text = "".join(event.delta for event in client.responses.create(
        model=MODEL, input=PROMPT, max_output_tokens=30, temperature=0, stream=True)
        if event.type == "response.output_text.delta")
    assert text == expected


def test_long_request_ids_of_clients_pass(worker: Worker, client: Any) -> None:
    count = worker.count()
    mine = "r" * 128
    assert chat(client, max_tokens=4, extra_headers={"x-request-id": mine}).choices
    assert worker.wait_for(count + 1)["id"].startswith(mine)


def test_models_lists_the_served_name(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
