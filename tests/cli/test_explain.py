"""`npuserve explain` against a fake AdminService."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from npuserve.cli.main import main
from npuserve.v1 import admin_service_pb2 as pb
from npuserve.v1 import admin_service_pb2_grpc

Capture = pytest.CaptureFixture[str]


class Administration(admin_service_pb2_grpc.AdminServiceServicer):
    """Servicer that knows the request "slow" of alice."""

    def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: grpc.ServicerContext
    ) -> pb.ExplainRequestResponse:
        if request.request_id != "slow" or request.client not in ("", "alice"):
            context.abort(grpc.StatusCode.NOT_FOUND, "request_id: no live request has this id")
        explained = pb.RequestExplanation(
            request_id="slow", client="alice", prompt_tokens=12, cached_tokens=4, generated_tokens=7, steps=8,
            complete=True,
            kernels=[pb.KernelComparison(kernel="linear", calls=40, mean_seconds=25e-6, usual_seconds=12.5e-6)])
        explained.duration.FromMilliseconds(1500)
        for cause, milliseconds, detail in (
            ("DELAY_CAUSE_NEIGHBOUR_PREFILL", 1200, "2560 prompt tokens of other requests"),
            ("DELAY_CAUSE_DECODE", 300, ""),
        ):
            delay = explained.delays.add(cause=cause, detail=detail)
            delay.duration.FromMilliseconds(milliseconds)
        return pb.ExplainRequestResponse(requests=[explained])


@pytest.fixture
def target() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(Administration(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_explain_prints_the_delays_the_longest_first(target: str, capsys: Capture) -> None:
    assert main(["explain", "slow", "--client", "alice", "--target", target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "request slow, sample 0, of alice: 1.500 s until its end",
        "12 prompt tokens (4 cached), 7 generated tokens, 8 steps",
        "      1.200 s   80%  neighbour_prefill  added to its tokens by prompts of other requests; "
        "2560 prompt tokens of other requests",
        "      0.300 s   20%  decode             computing its tokens, as usual",
        "  kernel linear: 40 calls timed, 25.0 µs, usually 12.5 µs"]


def test_explain_json_has_all_fields(target: str, capsys: Capture) -> None:
    assert main(["explain", "slow", "--json", "--target", target]) == 0
    (request,) = json.loads(capsys.readouterr().out)["requests"]
    assert request["delays"][0]["cause"] == "DELAY_CAUSE_NEIGHBOUR_PREFILL"
    assert request["live"] is False


def test_explain_of_an_unknown_request_fails_with_one_sentence(target: str, capsys: Capture) -> None:
    assert main(["explain", "other", "--target", target]) == 1
    assert "no live request has this id" in capsys.readouterr().err
