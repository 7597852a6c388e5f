"""Load generator and `npuserve bench serve` against a server with known delays."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.cli.bench import report as bench_report
from npuserve.cli.bench import serve as bench_serve
from npuserve.cli.bench.load_generator import INTERRUPTED, NO_FINISH, Load, Outcome
from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2

CONTEXT = 64


class FakeService(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer that streams max_tokens tokens.

    delay: seconds before each message.
    per_message: tokens of each message.
    refuse: each request with a number divisible by this fails with RESOURCE_EXHAUSTED; 0 for none.
    finishes: whether streams end with a Finish.
    crowd: requests that must have arrived before any is answered; 0 for no condition. `crowded` is called then.
    name: name of the model.
    """

    def __init__(self, delay: float = 0.0, per_message: int = 1, refuse: int = 0, finishes: bool = True, crowd: int = 0,
                 crowded: Callable[[], None] = lambda: None, name: str = "fake"):
        self.name = name
        self.delay, self.per_message, self.refuse, self.finishes = delay, per_message, refuse, finishes
        self.crowd, self.crowded, self.crowd_is_here = crowd, crowded, asyncio.Event()
        self.reason: int = generate_pb2.FINISH_REASON_LENGTH
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.peers: set[str] = set()
        self.running = self.most_running = 0

    async def GetModelInfo(self, request, context):
        return model_pb2.GetModelInfoResponse(
            name=self.name, family="FakeLM", vocabulary_size=100, max_model_len=CONTEXT, eos_token_ids=[2])

    async def StreamGenerate(self, request, context):
        self.requests.append(request)
        self.peers.add(context.peer())
        if self.refuse and len(self.requests) % self.refuse == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if len(self.requests) == self.crowd:
            self.crowd_is_here.set()
            self.crowded()
        try:
            if self.crowd:
                await self.crowd_is_here.wait()
            left = request.stopping.max_tokens
            while left:
                await asyncio.sleep(self.delay)
                now = min(left, self.per_message)
                left -= now
                answer = generate_pb2.StreamGenerateResponse(text="x" * now, token_ids=[7] * now)
                if not left and self.finishes:
                    answer.finish.reason = self.reason
                    answer.finish.usage.prompt_tokens = len(request.token_ids.ids)
                    answer.finish.usage.generated_tokens = request.stopping.max_tokens
                yield answer
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def served(service: FakeService) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def loaded(
    service: FakeService, requests: list[TimedRequest], channels: int = 1, **options: object
) -> tuple[list[Outcome], float]:
    async with served(service) as target:
        load = Load(target, channels, temperature=0.0, seed=3)
        try:
            info = await load.model_info()
            prompts = Prompts(info.vocabulary_size, info.eos_token_ids, 3)
            seconds = await load.run(requests, prompts, options.pop("stop", asyncio.Event()), **options)
        finally:
            await load.close()
    return load.outcomes, seconds


async def test_load_sends_each_request_and_records_arrivals():
    service = FakeService(delay=0.02, per_message=2)
    outcomes, seconds = await loaded(service, [TimedRequest(0.05 * i, 10 + i, 5) for i in range(4)])
    assert [o.code for o in outcomes] == ["OK"] * 4
    assert sorted(len(r.token_ids.ids) for r in service.requests) == [10, 11, 12, 13]
    for request in service.requests:
        assert request.stopping.max_tokens == 5
        assert request.stopping.ignore_eos
        assert request.output.return_token_ids
        assert all(2 < i < 100 for i in request.token_ids.ids)
    for outcome in outcomes:
        assert [count for _, count in outcome.arrivals] == [2, 2, 1]
        times = [time for time, _ in outcome.arrivals]
        # The n-th message is sent after n delays; 1 ms of tolerance for clocks.
        assert all(time - outcome.sent >= 0.019 * n for n, time in enumerate(times, 1))
        assert times == sorted(times)
        assert outcome.due <= outcome.sent
        assert times[-1] <= outcome.end <= seconds
        assert (outcome.reason, outcome.generated_tokens) == ("FINISH_REASON_LENGTH", 5)
    assert sorted(o.due for o in outcomes) == pytest.approx([0.0, 0.05, 0.1, 0.15])


async def test_load_finish_reason_of_a_newer_server_is_its_number():
    service = FakeService()
    service.reason = 99
    (outcome,), _ = await loaded(service, [TimedRequest(0.0, 4, 1)])
    assert (outcome.code, outcome.reason) == ("OK", "99")


async def test_load_open_loop_sends_on_time_regardless_of_running_requests():
    service = FakeService(crowd=20)
    await loaded(service, [TimedRequest(0.0, 4, 1)] * 20)
    assert service.most_running == 20


async def test_load_closed_loop_keeps_its_number_of_clients():
    service = FakeService(delay=0.01)
    outcomes, _ = await loaded(service, [TimedRequest(0.0, 4, 2)] * 12, concurrency=3)
    assert len(outcomes) == 12
    assert service.most_running == 3


async def test_load_each_channel_is_a_connection():
    service = FakeService()
    await loaded(service, [TimedRequest(0.0, 4, 1)] * 6, channels=3)
    assert len(service.peers) == 3


async def test_load_failures_are_counted_by_code():
    outcomes, seconds = await loaded(FakeService(refuse=3), [TimedRequest(0.0, 4, 2)] * 9)
    figures = bench_report.summary(outcomes, seconds, 9)
    assert figures["requests"] == {"asked": 9, "sent": 9, "ok": 6, "failed": {"RESOURCE_EXHAUSTED": 3}}
    assert {o.detail for o in outcomes if not o.ok} == {"the queue is full"}
    assert figures["tokens"]["output"] == 12


async def test_load_stream_without_a_finish_is_a_failure():
    outcomes, _ = await loaded(FakeService(finishes=False), [TimedRequest(0.0, 4, 2)])
    assert [o.code for o in outcomes] == [NO_FINISH]


@pytest.mark.parametrize("concurrency", [0, 2])
async def test_load_stop_cancels_and_counts_running_requests(concurrency: int):
    stop = asyncio.Event()
    service = FakeService(delay=60, crowd=2, crowded=stop.set)
    requests = [TimedRequest(0.0, 4, 1), TimedRequest(0.0, 4, 1), TimedRequest(100.0, 4, 1)]
    outcomes, seconds = await loaded(service, requests, stop=stop, concurrency=concurrency)
    assert [o.code for o in outcomes] == [INTERRUPTED] * 2
    assert seconds < 60
    assert bench_report.summary(outcomes, seconds, 3)["requests"]["failed"] == {INTERRUPTED: 2}


@pytest.mark.slow
async def test_load_open_loop_measures_latencies_from_the_due_time():
    """A load generator that stalls for 0.3 s while requests are due reports the stall."""
    stalls = iter([0.3])  # like a process that is not scheduled
    service = FakeService(crowd=1, crowded=lambda: time.sleep(next(stalls, 0.0)))
    requests = [TimedRequest(0.05 * i, 4, 1) for i in range(20)]
    outcomes, seconds = await loaded(service, requests)
    late = [o for o in outcomes if o.sent - o.due > 0.1]
    assert late
    for outcome in late:
        assert bench_report.ttft(outcome) >= outcome.sent - outcome.due
        assert bench_report.end_to_end(outcome) >= outcome.sent - outcome.due
        assert not bench_report.meets(outcome, 0.1, None)
    figures = bench_report.summary(outcomes, seconds, len(requests))
    assert figures["latency_ms"]["ttft"]["p99"] >= figures["latency_ms"]["lag"]["p99"] > 100
    assert bench_report.lag_warning(figures).startswith("the load generator sent late: lag p99 ")


async def test_load_closed_loop_requests_are_due_after_their_message_is_built(monkeypatch: pytest.MonkeyPatch):
    message, built = Load._message, []

    def recorded(self: Load, *arguments: Any) -> Any:
        try:
            return message(self, *arguments)
        finally:
            built.append(self._now())

    monkeypatch.setattr(Load, "_message", recorded)
    outcomes, _ = await loaded(FakeService(), [TimedRequest(0.0, 4, 2)] * 6, concurrency=1)
    assert all(at <= outcome.due <= outcome.sent for at, outcome in zip(built, outcomes, strict=True))


# The command


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def served_elsewhere(service: FakeService) -> Iterator[str]:
    """Run `served` in a thread, because `run` starts its own event loop."""
    target: list[str] = []
    up, down = threading.Event(), threading.Event()

    async def serve() -> None:
        async with served(service) as address:
            target.append(address)
            up.set()
            await asyncio.to_thread(down.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(60)
    try:
        yield target[0]
    finally:
        down.set()
        thread.join()


def test_run_prints_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    figures = tmp_path / "out.json"
    with served_elsewhere(FakeService(delay=0.005, refuse=5)) as target:
        code = bench_serve.run(parsed(
            "--target", target, "--rate", "200", "--requests", "10", "--prompt-tokens", "60", "--output-tokens", "8",
            "--slo-ttft-ms", "5000", "--json", str(figures)))
    output = capsys.readouterr()
    assert code == 0
    assert "8 ok, 2 RESOURCE_EXHAUSTED failed, 0 not sent" in output.out
    assert "10 of 10 requests are cut" in output.err
    written = json.loads(figures.read_text())
    assert written["model"]["name"] == "fake"
    assert written["options"]["rate"] == 200
    assert written["tokens"] == {"prompt": 8 * 56, "cached": 0, "output": 8 * 8}
    assert written["goodput_per_second"] == pytest.approx(8 / written["seconds"])
    assert len(written["outcomes"]) == 10


@pytest.mark.parametrize("name", ["qwen[/v1]", "qwen[v1]"])
def test_run_prints_a_model_name_with_brackets_as_it_is(name: str, capsys: pytest.CaptureFixture[str]):
    with served_elsewhere(FakeService(name=name)) as target:
        assert bench_serve.run(parsed("--target", target, "--requests", "1")) == 0
    assert capsys.readouterr().out.startswith(f"{name} (FakeLM")


def test_run_whose_output_cannot_be_printed_writes_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def show(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bench_report, "show", show)
    figures = tmp_path / "out.json"
    with served_elsewhere(FakeService()) as target, pytest.raises(OSError, match="No space"):
        bench_serve.run(parsed("--target", target, "--requests", "1", "--json", str(figures)))
    assert json.loads(figures.read_text())["requests"]["ok"] == 1


@pytest.mark.slow
def test_run_plot_writes_an_image(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    with served_elsewhere(FakeService(refuse=2)) as target:
        assert bench_serve.run(parsed("--target", target, "--requests", "4", "--plot", str(picture))) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_run_unknown_image_format_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    assert bench_serve.run(parsed("--plot", "out.xyz")) == 1
    assert "--plot: unknown image format 'xyz'" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_that_a_signal_ends_prints_partial_figures(
    capsys: pytest.CaptureFixture[str], number: int, exit_code: int
):
    service = FakeService(delay=60, crowd=2, crowded=lambda: os.kill(os.getpid(), number))
    with served_elsewhere(service) as target:
        code = bench_serve.run(parsed("--target", target, "--concurrency", "2", "--requests", "5"))
    assert code == exit_code
    assert "0 ok, 2 INTERRUPTED failed, 3 not sent" in capsys.readouterr().out


def test_run_invalid_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert bench_serve.run(parsed("--json", str(tmp_path / "no" / "x.json"))) == 1
    assert "--json: there is no folder" in capsys.readouterr().err
    assert bench_serve.run(parsed("--json", str(tmp_path))) == 1
    assert f"--json: {tmp_path} is a folder" in capsys.readouterr().err
    assert bench_serve.run(parsed("--json", "/proc/x.json")) == 1
    assert "--json: /proc/x.json cannot be written: " in capsys.readouterr().err
    assert bench_serve.run(parsed("--json", str(tmp_path / ("x" * 300)))) == 1
    assert "cannot be written: File name too long" in capsys.readouterr().err
    assert bench_serve.run(parsed("--requests", "0")) == 1
    assert "--requests" in capsys.readouterr().err
    assert bench_serve.run(parsed("--trace", str(tmp_path / "absent"))) == 1
    assert "absent" in capsys.readouterr().err
    assert bench_serve.run(parsed("--tls-ca", str(tmp_path / "absent.pem"))) == 1
    assert "absent.pem: No such file" in capsys.readouterr().err
    monkeypatch.setattr(bench_serve.importlib.util, "find_spec", lambda name: None)
    assert bench_serve.run(parsed("--plot", str(tmp_path / "x.png"))) == 1
    assert "npuserve[bench]" in capsys.readouterr().err


def test_run_that_does_not_start_makes_and_removes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("absent.json")
    for name in ("old.json", "new.json", "link.json"):
        assert bench_serve.run(parsed("--json", str(tmp_path / name), "--requests", "0")) == 1
        assert "--requests" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "--rate: must be at least"),
        (["--rate", "nan"], "--rate: must be at least"),
        (["--concurrency", "two"], "--concurrency: must be at least 1"),
        (["--temperature", "101"], r"--temperature: must be in \[0, 100\]"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
    ],
)
def test_options_out_of_range_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert re.search(message, capsys.readouterr().err)
