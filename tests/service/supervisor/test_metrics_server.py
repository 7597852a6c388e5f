"""HTTP server of the metrics page: answers and limits."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from npuserve.service.supervisor import metrics_server
from npuserve.service.supervisor.metrics_server import MetricsServer
from tests.support.processes import until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, lambda: "answer 42.0\n")
    yield made
    made.close()
    assert not made._thread.is_alive()


def get(server: MetricsServer, **headers: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def raw(server: MetricsServer, sent: bytes) -> bytes:
    """Return all that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                found += part
        return found


def test_metrics_server_page_is_plain_for_all_encodings_and_queries(server: MetricsServer) -> None:
    assert get(server) == b"answer 42.0\n"
    assert get(server, **{"Accept-Encoding": "gzip"}) == b"answer 42.0\n"
    assert get(server, Accept="application/openmetrics-text; version=1.0.0") == b"answer 42.0\n"
    head, _, body = raw(server, b"GET /?name[]=none HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert body == b"answer 42.0\n"
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 12\r\n" in head


@pytest.mark.parametrize("target", [
    b"/", b"/metrics", b"/metrics/", b"/metrics?name[]=a", b"http://pod:9090/metrics", b"http://pod:9090"])
def test_metrics_server_target_of_page_gets_page(server: MetricsServer, target: bytes) -> None:
    assert raw(server, b"GET " + target + b" HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("target", [b"/health", b"/v1/models", b"/metricsx", b"/metrics/health", b"http://pod:9090/ready"])
def test_metrics_server_other_path_is_not_found(server: MetricsServer, target: bytes) -> None:
    answer = raw(server, b"GET " + target + b" HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert answer.endswith(metrics_server.NOT_FOUND)


@pytest.mark.parametrize(("sent", "status"), [
    (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"), (b"nonsense\r\n\r\n", b"400"), (b"\x16\x03\x01\xff\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
])
def test_metrics_server_bad_request_is_refused(server: MetricsServer, sent: bytes, status: bytes) -> None:
    assert raw(server, sent).startswith(b"HTTP/1.1 " + status)


def test_metrics_server_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch, server: MetricsServer) -> None:
    monkeypatch.setattr(metrics_server, "EXCHANGE_SECONDS", 0.2)
    assert raw(server, b"GET /metrics HTTP/1.1\r\n") == b""


def test_metrics_server_too_many_connections_closes_oldest(
    monkeypatch: pytest.MonkeyPatch, server: MetricsServer
) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(metrics_server, "EXCHANGE_SECONDS", 600)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
                for _ in range(9)]
        assert b"answer" in get(server)
        for connection in idle[:6]:  # the last three and the scraper's make four
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        for connection in idle[6:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


@pytest.mark.slow
def test_metrics_server_slow_reader_blocks_no_other(server: MetricsServer) -> None:
    pages = iter(("x" * (64 << 20), "small"))
    server._page = lambda: next(pages)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        slow.recv(1)
        assert get(server) == b"small"


def test_metrics_server_page_error_is_500_and_logged_once(
    server: MetricsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def page() -> str:
        raise ZeroDivisionError

    server._page = page
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(server)
    assert [record.message for record in caplog.records].count("no metrics page could be made") == 1


def test_metrics_server_close_with_open_connections_ends_thread() -> None:
    server = MetricsServer("127.0.0.1", 0, str)
    with socket.create_connection(("127.0.0.1", server.port)):
        began, threads = time.monotonic(), threading.active_count()
        server.close()
        assert time.monotonic() - began < metrics_server.EXCHANGE_SECONDS
        assert threading.active_count() == threads - 1


def test_metrics_server_close_during_an_exchange_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = MetricsServer("127.0.0.1", 0, str)
    with socket.create_connection(("127.0.0.1", server.port)) as unfinished:
        unfinished.sendall(b"GET /")
        until(lambda: server._exchanges)
        server.close()
    assert not caplog.records


def test_metrics_server_listens_on_every_address_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ::1 and 127.0.0.1 of localhost, where gRPC listens too. An address that the machine lacks is left out."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
        for address in ("192.0.2.1", "127.0.0.2", "127.0.0.1")])
    server = MetricsServer("two", 0, lambda: "answer 42.0\n")
    monkeypatch.undo()
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            with urllib.request.urlopen(f"http://{address}:{server.port}/metrics", timeout=60) as answer:
                assert answer.read() == b"answer 42.0\n"
    finally:
        server.close()


def test_metrics_server_free_port_is_free_on_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 0 is another port at each attempt."""
    bound, ports = metrics_server._bound, []

    def taken_at_first(family: int, address: tuple[str, int]) -> socket.socket:
        if address[1]:
            ports.append(address[1])
            if len(ports) < 3:
                raise OSError(errno.EADDRINUSE, "Address already in use")
        return bound(family, address)

    monkeypatch.setattr(metrics_server, "_bound", taken_at_first)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.43.0.3", "127.43.0.4")])
    server = MetricsServer("two", 0, lambda: "answer 42.0\n")
    server.close()
    assert len(ports) >= 3
    assert server.port == ports[-1]

    ports.clear()
    monkeypatch.setattr(metrics_server, "MAX_FREE_PORTS", 2)
    with pytest.raises(OSError, match="in use"):
        MetricsServer("two", 0, lambda: "answer 42.0\n")
    assert len(ports) == 2


def test_metrics_server_taken_port_of_a_further_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process listens on these addresses."""
    free, taken_address = "127.43.0.1", "127.43.0.2"
    with socket.create_server((taken_address, 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in (free, taken_address)])
        with pytest.raises(OSError, match="in use"):
            MetricsServer("two", port, str)
    with socket.create_server((free, port)):
        pass  # it is free again


def test_metrics_server_without_any_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="assign requested address"):
        MetricsServer("192.0.2.1", 0, str)
