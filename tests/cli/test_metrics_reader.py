"""Metrics pages and the window between two of them, with numbers that a reader can check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from npuserve.cli.metrics_reader import Page, Unreadable, Window, parse_page, read_page


def histogram(name: str, *buckets: tuple[str, int], total: float, labels: str = "") -> str:
    within = f"{labels}," if labels else ""
    lines = [f'{name}_bucket{{{within}le="{bound}"}} {count}' for bound, count in buckets]
    plain = f"{{{labels}}}" if labels else ""
    return "\n".join([f"# TYPE {name} histogram", *lines, f"{name}_count{plain} {buckets[-1][1]}",
                      f"{name}_sum{plain} {total}"]) + "\n"


def pages(before: str, after: str, seconds: float = 2.0) -> Window:
    first, second = parse_page(before), parse_page(after)
    return Window(Page(10.0, first.samples), Page(10.0 + seconds, second.samples))


def requests(*counts: int) -> str:
    labels = [("Generate", "OK"), ("Generate", "INTERNAL"), ("StreamGenerate", "OK")]
    return "# TYPE npuserve_requests counter\n" + "".join(
        f'npuserve_requests_total{{rpc="{rpc}",code="{code}"}} {count}\n'
        for (rpc, code), count in zip(labels, counts, strict=True))


def test_rate_sums_over_other_labels() -> None:
    window = pages(requests(1, 0, 10), requests(3, 1, 40))
    assert window.rate("npuserve_requests_total") == 33 / 2
    assert window.rate("npuserve_requests_total", code="OK") == 32 / 2
    assert window.rate("npuserve_requests_total", rpc="Generate", code="INTERNAL") == 0.5
    assert window.rate("npuserve_requests_total", rpc="none") == 0


def test_rate_of_a_restarted_server_counts_from_zero() -> None:
    window = pages(requests(100, 0, 0), requests(4, 0, 0))
    assert window.rate("npuserve_requests_total") == 2


BUCKETS = ("0.1", "0.2", "0.4", "+Inf")


@pytest.mark.parametrize(("counts", "q", "seconds"), [
    ((10, 10, 10, 10), 0.5, 0.05),
    ((0, 10, 10, 10), 0.5, 0.15),
    ((5, 5, 10, 10), 0.5, 0.1),
    ((5, 5, 10, 10), 0.9, 0.36),
    ((0, 0, 0, 10), 0.5, 0.4),
    ((2, 4, 8, 10), 0.99, 0.4),
    ((0, 0, 0, 0), 0.5, None),
])
def test_quantile_is_linear_within_a_bucket(counts: tuple[int, ...], q: float, seconds: float | None) -> None:
    name = "npuserve_queue_time_seconds"
    empty = histogram(name, *((bound, 7) for bound in BUCKETS), total=0.0)
    after = histogram(name, *((bound, 7 + count) for bound, count in zip(BUCKETS, counts, strict=True)), total=3.0)
    window = pages(empty, after)
    assert window.quantile(q, name) == (None if seconds is None else pytest.approx(seconds))
    assert window.mean(name) == (None if seconds is None else pytest.approx(3.0 / counts[-1]))


def test_quantile_covers_all_samples_with_the_labels() -> None:
    name = "npuserve_step_seconds"
    after = histogram(name, ("0.1", 10), ("+Inf", 10), total=0.5, labels='phase="decode"') + "\n".join(
        histogram(name, ("0.1", 0), ("+Inf", 10), total=9.5, labels='phase="prefill"').splitlines()[1:]) + "\n"
    window = Window(Page(0.0), parse_page(after))
    assert window.quantile(0.25, name) == pytest.approx(0.05)
    assert window.quantile(0.5, name, phase="decode") == pytest.approx(0.05)
    assert window.mean(name) == pytest.approx(0.5)
    assert window.quantile(0.5, name, phase="mixed") is None


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_read_page_failure_is_one_sentence(free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}/metrics"
    with pytest.raises(Unreadable, match=rf"^{url}: no server answers there \(Connection refused\); start one with:"):
        read_page(url)
    with answering(404, "") as url, pytest.raises(Unreadable, match=rf"^{url}: HTTP 404, no metrics page$"):
        read_page(url)
    speaks_no_tls = pytest.raises(Unreadable, match=r": this port speaks no TLS; the metrics page is http://$")
    with answering(200, "") as url, speaks_no_tls:
        read_page(url.replace("http:", "https:"))
    with answering(200, "up 1\n") as url, pytest.raises(Unreadable, match=r"not a metrics page: it has no metric of"):
        read_page(url)
    with answering(200, "<html>") as url, pytest.raises(Unreadable, match="not a metrics page"):
        read_page(url)
    with answering(200, requests(1, 2, 3)) as url:
        assert read_page(url).sum("npuserve_requests_total") == 6
