"""One server with the built-in model, from a request of each kind to the death of its engine.

These are the tests of a whole server that `pytest` runs without --slow; the other files of this folder have the cases.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from npuserve.client import Client
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2, prompt_pb2, tokenize_pb2
from tests.e2e.brittle import BRITTLE, SLOW
from tests.e2e.processes import engine_of, until
from tests.e2e.server import KV_CACHE_MEMORY, Server, request, serving, streamed

PROMPT = "Once upon a time"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File that makes each step of `server` slower while it exists."""
    file: Path = tmp_path_factory.mktemp("slow") / "slow"
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, slow: Path) -> Iterator[Server]:
    """Server of a copy of the built-in model, with a chat template that returns the content of the messages."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("smoke") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SLOW, str(slow))
        with serving(str(folder), "--kv-cache-memory", KV_CACHE_MEMORY, "--debuggable", **BRITTLE) as running:
            yield running


@pytest.fixture(scope="module")
def answer(server: Server) -> pb.GenerateResponse:
    """Greedy answer of 32 tokens."""
    answer: pb.GenerateResponse = server.stub.Generate(request(PROMPT, 32), timeout=60)
    return answer


def is_idle(server: Server) -> bool:
    return not any(server.metric(name) for name in ("npuserve_requests_running", "npuserve_requests_waiting")) and (
        server.metric("npuserve_kv_cache_blocks", state="used") == 0)


def test_health_of_a_ready_server_is_serving(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.channel)
    for service in ("", "npuserve.liveness", "npuserve.readiness"):
        checked = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


def test_unary_answer_is_the_text_of_its_tokens(server: Server, answer: pb.GenerateResponse) -> None:
    assert len(answer.token_ids) == answer.finish.usage.generated_tokens == 32
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    decoded = server.stub.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=answer.token_ids), timeout=60)
    assert decoded.text.strip() == answer.text.strip() != ""


def test_stream_equals_the_unary_answer(server: Server, answer: pb.GenerateResponse) -> None:
    text, ids, finish = streamed(server.stub, request(PROMPT, 32))
    assert (text, ids, finish.reason) == (answer.text, list(answer.token_ids), answer.finish.reason)


def test_chat_is_the_templates_prompt(server: Server, answer: pb.GenerateResponse) -> None:
    ask = request("", 32)
    ask.chat.messages.add(role="user", content="Once upon")
    ask.chat.messages.add(role="user", content=" a time")
    chat = server.stub.Generate(ask, timeout=60)
    assert list(chat.token_ids) == list(answer.token_ids)
    assert chat.finish.usage.prompt_tokens == answer.finish.usage.prompt_tokens


def test_stop_string_ends_the_text_before_it(server: Server, answer: pb.GenerateResponse) -> None:
    stop = answer.text[20:24]
    text, _, finish = streamed(server.stub, request(PROMPT, 32, stop=[stop]))
    assert text == answer.text.partition(stop)[0]
    assert (finish.reason, finish.matched_stop) == (pb.FINISH_REASON_STOP_STRING, stop)


def test_samples_are_the_answers_to_their_seeds(server: Server) -> None:
    ask = request(PROMPT, 12, temperature=4.0, seed=5, n=3)
    samples = server.stub.Generate(ask, timeout=60).samples
    alone = [server.stub.Generate(request(PROMPT, 12, temperature=4.0, seed=5 + index), timeout=60).text
             for index in range(3)]
    assert [sample.text for sample in samples] == alone
    assert len(set(alone)) == 3


def test_logprobs_of_a_greedy_answer_have_the_chosen_token_first(server: Server) -> None:
    whole = server.stub.Generate(request(PROMPT, 8, logprobs=3, prompt_logprobs=1), timeout=60)
    assert [position.chosen.token_id for position in whole.logprobs] == list(whole.token_ids)
    for position in whole.logprobs:
        assert (position.top[0].token_id, position.chosen.rank) == (position.chosen.token_id, 1)
        assert 0 < sum(math.exp(top.logprob) for top in position.top) <= 1
    assert len(whole.prompt_logprobs) == whole.finish.usage.prompt_tokens


def test_constraint_is_satisfied(server: Server) -> None:
    pattern = r"[A-Z][a-z]{2,6}, (cat|dog), \d{4}"
    whole = server.stub.Generate(request(PROMPT, 64, regex=pattern), timeout=60)
    assert re.fullmatch(pattern, whole.text)
    assert whole.finish.grammar_completed


def test_repeated_prompt_is_found_in_the_prefix_cache(server: Server) -> None:
    ask = request([7] * 200, 4, ignore_eos=True)
    first, second = (server.stub.Generate(ask, timeout=60) for _ in range(2))
    assert (first.finish.usage.cached_tokens, list(first.token_ids)) == (0, list(second.token_ids))
    assert second.finish.usage.cached_tokens >= 64


def test_cancel_frees_the_request(server: Server) -> None:
    call = server.stub.StreamGenerate(request(PROMPT, 400, ignore_eos=True), timeout=60)
    next(call)
    call.cancel()
    until(lambda: is_idle(server), server)


def test_deadline_ends_the_answer_with_its_output(server: Server, slow: Path, answer: pb.GenerateResponse) -> None:
    slow.write_text("0.1")
    try:
        cut = server.stub.Generate(request(PROMPT, 32), timeout=2)
    finally:
        slow.unlink()
    assert cut.finish.reason == pb.FINISH_REASON_DEADLINE
    assert 0 < len(cut.token_ids) < 32
    assert answer.text.startswith(cut.text)


@pytest.mark.parametrize(("fields", "field"), [
    ({"top_p": 7.0}, "sampling.top_p"), ({"max_tokens": 1 << 20}, "stopping.max_tokens"),
    ({"regex": "("}, "regex")])
def test_bad_input_is_refused_by_the_name_of_its_field(server: Server, fields: dict[str, object], field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        server.stub.Generate(request(PROMPT, **fields), timeout=60)  # type: ignore[arg-type]
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    named = []
    for detail in rpc_status.from_call(refused.value).details:
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            named += [violation.field for violation in violations.field_violations]
    assert named == [field]


def test_model_info_and_tokens_of_a_chat(server: Server) -> None:
    info = server.stub.GetModelInfo(model_pb2.GetModelInfoRequest(), timeout=60)
    assert info.family == "Qwen3ForCausalLM"
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content=PROMPT)])
    whole, text = (server.stub.Tokenize(tokenize_pb2.TokenizeRequest(**prompt), timeout=60).token_ids
                   for prompt in ({"chat": chat}, {"text": PROMPT}))
    assert list(whole) == list(text)


def test_metrics_page_counts_a_requests_tokens(server: Server) -> None:
    before = server.metric("npuserve_generation_tokens_total")
    server.stub.Generate(request(PROMPT, 16, ignore_eos=True), timeout=60)
    until(lambda: server.metric("npuserve_generation_tokens_total") == before + 16, server)
    with urllib.request.urlopen(server.metrics_url) as page:
        assert "# TYPE npuserve_time_to_first_token_seconds histogram" in page.read().decode()


def test_stream_goes_on_after_the_engine_is_killed(server: Server, answer: pb.GenerateResponse) -> None:
    """The Python client's user receives the whole text and no error."""
    restarts = server.metric("npuserve_engine_restarts_total")
    whole = server.stub.Generate(request(PROMPT, 400, ignore_eos=True), timeout=60).text
    with Client(server.target, timeout=100) as client:
        stream = client.stream(PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
        text = next(stream).text
        os.kill(engine_of(server), signal.SIGKILL)
        text += "".join(delta.text for delta in stream)
    assert text == whole
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1


def test_sigterm_exits_0_after_running_streams(server: Server) -> None:
    """Last test of the shared server."""
    call = server.stub.StreamGenerate(request(PROMPT, 200, ignore_eos=True), timeout=60)
    tokens = len(next(call).token_ids)
    server.process.send_signal(signal.SIGTERM)
    assert tokens + sum(len(part.token_ids) for part in call) == 200
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log
