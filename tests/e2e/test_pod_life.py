"""Life of a pod as rendered by the chart, as processes: start, probes, load, death of the engine, deletion."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.serving.server import engine_of
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e.kubelet import Container, entrypoint
from tests.e2e.server import request
from tests.support.processes import free_port, has_mount_namespaces, require_mount_namespaces

STREAMS = 4
"""Number of streams at SIGTERM."""
PAUSE_SECONDS = 3
"""Between two calls of a client."""
HEALTH = health_pb2.HealthCheckResponse

chart = pytest.importorskip("tests.helm.chart")
pytestmark = [chart.needs_helm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    """Container with the chart's own times and settings, except for free ports, since pods share an address here.

    It has started, with a read-only file system where mount namespaces are allowed, and the tests share it. Its volumes
    have short paths, as in a pod: a socket's path is limited to 100 characters.
    """
    objects = chart.render({"host": "127.0.0.1", "ports": {
        "grpc": free_port(), "metrics": free_port(), "health": free_port()}})
    config = {"npuserve.toml": chart.config_file(objects)}
    with tempfile.TemporaryDirectory() as volumes:
        program = entrypoint(chart.ROOT / "docker" / "Dockerfile.cpu")
        made = Container(chart.pod(objects), config, program, Path(volumes))
        try:
            made.start(read_only=has_mount_namespaces())
            made.succeed("startup", 0.1)
            yield made
        finally:
            made.close()


@pytest.fixture
def channel(container: Container) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{container.spec['ports'][0]['containerPort']}") as made:
        yield made


class Stream(threading.Thread):
    """Client that sends one call after the other until `enough`, or only one; `cut` lists incomplete streams.

    taken: the server has accepted the first call.
    """

    def __init__(self, channel: grpc.Channel, number: int, one: bool):
        super().__init__(daemon=True)
        self.stub = rpc.InferenceServiceStub(channel)
        self.number = number
        self.enough = threading.Event()
        self.one = one
        self.taken = threading.Event()
        self.whole = 0
        self.cut: list[str] = []
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        while True:
            tokens, finished = 0, False
            ask = request([1 + self.number], 480, ignore_eos=True)
            try:
                call = self.stub.StreamGenerate(ask, timeout=200)
                call.initial_metadata()
                self.taken.set()
                for part in call:
                    assert part.offset == tokens
                    tokens += len(part.token_ids)
                    finished = part.HasField("finish")
            except grpc.RpcError as error:
                self.cut.append(f"stream {self.number} after {tokens} tokens: {error.code().name} {error.details()}")
                break
            if finished and tokens == 480:
                self.whole += 1
            else:
                self.cut.append(f"stream {self.number} ended after {tokens} tokens without a finish")
            if self.one or self.enough.wait(PAUSE_SECONDS):
                break
        self.ended = time.monotonic()


def start_streams(channel: grpc.Channel, count: int, one: bool = False) -> list[Stream]:
    """Return accepted streams of 480 tokens. one: each makes one call."""
    streams = [Stream(channel, number, one) for number in range(count)]
    assert all(stream.taken.wait(60) for stream in streams)
    return streams


def watch(channel: grpc.Channel, seen: list[tuple[float, int]]) -> threading.Thread:
    """Append (time, status) of each change of readiness to `seen`, until the server or the channel ends."""
    def run() -> None:
        request = health_pb2.HealthCheckRequest(service="npuserve.readiness")
        with contextlib.suppress(grpc.RpcError):
            for update in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=250):
                seen.append((time.monotonic(), update.status))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_it_writes_to_its_volumes_alone(container: Container, channel: grpc.Channel):
    """Its threads are the CPUs that the pod requests."""
    require_mount_namespaces()
    environment = dict(entry.split("=", 1) for entry in
                       Path(f"/proc/{container.process.pid}/environ").read_text().split("\0") if "=" in entry)
    requests = container.spec["resources"]["requests"]
    assert environment["NPUSERVE_THREADS"] == str(requests["cpu"])
    answer = rpc.InferenceServiceStub(channel).Generate(request("Once upon a time", 8), timeout=60)
    assert answer.finish.usage.generated_tokens == 8
    assert len(list(Path(environment["TMPDIR"]).glob("npuserve-*/engine.sock"))) == 1


@pytest.mark.full
def test_an_engine_that_dies_does_not_kill_the_pod(container: Container, channel: grpc.Channel):
    seen: list[tuple[float, int]] = []
    watch(channel, seen)
    while not seen:
        time.sleep(0.01)
    os.kill(engine_of(container.process.pid), signal.SIGKILL)
    deadline = time.monotonic() + 90
    while len(seen) < 3:
        assert container.probe("liveness"), "the kubelet would count this against the container"
        assert time.monotonic() < deadline, container.log
        time.sleep(0.05)
    assert [status for _, status in seen] == [HEALTH.SERVING, HEALTH.NOT_SERVING, HEALTH.SERVING]
    assert container.probe("readiness")
    assert container.process.poll() is None


def test_no_stream_is_cut_when_a_pod_is_deleted(container: Container, channel: grpc.Channel):
    """Last test of the container."""
    assert container.probe("readiness")
    assert container.probe("liveness")
    seen: list[tuple[float, int]] = []
    watching = watch(channel, seen)
    earlier, last, signalled = start_streams(channel, 2), [], []

    def before_signal() -> None:
        """Start the last calls. During preStop the pod serves until load balancers have removed it."""
        assert container.probe("readiness")
        assert container.probe("liveness")
        for stream in earlier:
            stream.enough.set()
        for stream in earlier:
            stream.join(60)
        last.extend(start_streams(channel, STREAMS, one=True))
        signalled.append(time.monotonic())

    began = time.monotonic()
    code, killed = container.terminate(before_signal)
    left = time.monotonic()
    for stream in last:
        stream.join(60)
    watching.join(60)

    assert [text for stream in earlier + last for text in stream.cut] == []
    assert (code, killed) == (0, False), container.log
    assert left - began < container.grace
    assert [status for _, status in seen] == [HEALTH.SERVING, HEALTH.NOT_SERVING]
    down, ended = seen[-1][0], [stream.ended for stream in last]
    assert signalled[0] < down
    assert down < max(ended), "readiness goes down while streams run"
    print(f"{STREAMS} streams at SIGTERM, {sum(s.whole for s in earlier)} before, 0 cut; readiness down after "
          f"{down - signalled[0]:.3f} s, the last stream's end after {max(ended) - signalled[0]:.1f} s, exit 0 "
          f"{left - began:.1f} s after the deletion, of {container.grace:.0f} s grace")
