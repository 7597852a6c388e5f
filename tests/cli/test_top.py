"""`npuserve top` on given pages, and without a server."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest
from rich.console import Console

from npuserve.cli import top
from npuserve.cli.main import main
from npuserve.cli.metrics_reader import Page, Window
from tests.cli.test_metrics_reader import answering, histogram, pages
from tests.support.command import npuserve

KERNEL = "npuserve_kernel_latency_seconds"


def page(
    tokens: int, linear: int, swiglu: int, *, waiting: int = 0, ok: int = 0, failed: int = 0, age: float = 0.2
) -> str:
    """Return a page with `tokens` tokens, `linear` kernel calls of 1 ms and `swiglu` calls of 3 ms."""
    def kernel(name: str, calls: int, seconds: float) -> str:
        text = histogram(KERNEL, ("0.002", calls if seconds < 0.002 else 0), ("0.005", calls), ("+Inf", calls),
                         total=calls * seconds, labels=f'kernel="{name}",phase="decode",backend="cpu"')
        return text.partition("\n")[2]

    return "\n".join([
        "# TYPE npuserve_build_info gauge",
        'npuserve_build_info{version="1.2.3",torch="2",backend="cpu",model="teller"} 1',
        "# TYPE npuserve_generation_tokens counter", f"npuserve_generation_tokens_total {tokens}",
        "# TYPE npuserve_requests counter", f'npuserve_requests_total{{rpc="Generate",code="OK"}} {ok}',
        f'npuserve_requests_total{{rpc="Generate",code="INTERNAL"}} {failed}',
        f'npuserve_requests_total{{rpc="Generate",code="CANCELLED"}} {ok}',
        "# TYPE npuserve_requests_waiting gauge", f"npuserve_requests_waiting {waiting}",
        "# TYPE npuserve_engine_heartbeat_age_seconds gauge", f"npuserve_engine_heartbeat_age_seconds {age}",
        f"# TYPE {KERNEL} histogram", kernel("linear", linear, 0.001), kernel("swiglu", swiglu, 0.003)]) + "\n"


def shown(window: Window) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(top.view(top.figures(window), "host:9090"))
    return out.getvalue()


def test_figures_cover_the_time_between_the_pages() -> None:
    found = top.figures(pages(page(100, 10, 10), page(300, 20, 11, waiting=3, ok=4, failed=2)))
    assert (found["model"], found["backend"], found["version"]) == ("teller", "cpu", "1.2.3")
    assert (found["generated_tokens"], found["waiting"], found["errors"]) == (100, 3, 1)
    assert [(kernel["kernel"], kernel["calls"]) for kernel in found["kernels"]] == [("linear", 10), ("swiglu", 1)]
    assert found["kernels"][0]["share"] == pytest.approx(10 / 13)
    assert found["kernels"][0]["mean"] == pytest.approx(0.001)
    assert found["kernels"][1]["p50"] == pytest.approx(0.0035)
    assert not found["kernels_since_start"]


def test_view_shows_how_many_steps_computed_the_head_for_drafts() -> None:
    def heads(computed: int, stopped: int) -> str:
        return page(100, 10, 10) + "\n".join([
            "# TYPE npuserve_head_steps counter", f'npuserve_head_steps_total{{head="computed"}} {computed}',
            f'npuserve_head_steps_total{{head="stopped"}} {stopped}', ""])

    assert "draft head 25% of steps" in shown(pages(heads(10, 10), heads(20, 40)))
    assert "draft head" not in shown(pages(heads(0, 0), heads(0, 0)))


def test_figures_untimed_kernels_cover_the_time_since_the_start() -> None:
    window = pages(page(100, 10, 20), page(300, 10, 20))
    found = top.figures(window)
    assert found["kernels_since_start"]
    assert [(kernel["kernel"], kernel["calls"]) for kernel in found["kernels"]] == [("swiglu", 20), ("linear", 10)]
    assert "kernels, since the start" in shown(window)


def test_view_shows_model_load_and_kernels() -> None:
    text = shown(pages(page(100, 10, 10), page(300, 20, 11, waiting=3)))
    assert "teller  cpu  npuserve 1.2.3  host:9090" in text
    assert "generated 100 tok/s" in text
    assert "waiting 3" in text
    line = next(line for line in text.splitlines() if line.startswith("linear"))
    assert line.split() == ["linear", "decode", "cpu", "76.9%", "10", "1", "ms", "1", "ms", "1.98", "ms"]
    assert "heartbeat" not in text
    assert "no heartbeat of the engine for 42 s" in shown(pages(page(1, 0, 0), page(1, 0, 0, age=42)))


def test_view_without_observations_has_dashes() -> None:
    bare = "# TYPE npuserve_requests_running gauge\nnpuserve_requests_running 0\n"
    text = shown(pages(bare, bare))
    assert "no model yet" in text
    assert "time to first token" in text
    assert "nan" not in text


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "–"), (12.345, "12.35 s"), (0.0123, "12.3 ms"), (0.000456, "456 µs"), (0.0, "0 µs")])
def test_time_has_three_digits(seconds: float | None, text: str) -> None:
    assert top._time(seconds) == text


def test_top_once_prints_one_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, page(100, 10, 10)) as url:
        target = url.split("/")[2]
        assert main(["top", "--once", "--interval", "0.1", "--target", target]) == 0
        assert "teller" in capsys.readouterr().out
        assert main(["top", "--json", "--interval", "0.1", "--target", target]) == 0
        assert json.loads(capsys.readouterr().out)["generated_tokens"] == 0


@pytest.mark.slow
def test_top_accepts_the_url_that_serve_prints() -> None:
    with answering(200, page(100, 10, 10)) as url:
        for target in (url, url.removesuffix("/metrics"), f"{url.removesuffix('metrics')}"):
            done = npuserve("top", "--once", "--interval", "0.1", "--target", target)
            assert (done.returncode, done.stderr) == (0, "")
            assert f"teller  cpu  npuserve 1.2.3  {url.split('/')[2]}  over" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["localhost", "ftp://host:1/metrics", "http://", "host:port", ""])
def test_top_invalid_target_is_refused(target: str) -> None:
    done = npuserve("top", "--target", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"npuserve top: argument --target: must be HOST:PORT or a URL, got {target!r}; "
                           "see npuserve top --help\n")


def kernels_shown(width: int) -> list[list[str]]:
    """Return the cells of the table of kernels that `npuserve top` prints at this width."""
    long = page(100, 1234567, 1234567).replace('kernel="linear"', 'kernel="qk_norm_rope_kv_write"')
    with answering(200, long) as url:
        done = npuserve("top", "--once", "--interval", "0.1", "--target", url, environ={"COLUMNS": str(width)})
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width
    start = next(i for i, line in enumerate(lines) if line.startswith("kernels"))
    return [re.split(r" +(?=\S)(?!ms|µs|s )", line.strip()) for line in lines[start:]]


def test_top_on_80_columns_shows_every_column() -> None:
    head, *rows = kernels_shown(80)
    assert head[-7:] == ["phase", "backend", "share", "calls", "mean", "p50", "p99"]
    assert ["qk_norm_rope_kv_write", "decode", "cpu", "25.0%", "1234567", "1 ms", "1 ms", "1.98 ms"] in rows


def test_top_on_a_narrow_screen_drops_whole_columns() -> None:
    head, *rows = kernels_shown(60)
    assert head[-5:] == ["phase", "share", "mean", "p50", "p99"]
    assert ["qk_norm_rope_kv_write", "decode", "25.0%", "1 ms", "1 ms", "1.98 ms"] in rows
    assert "a wider screen shows backend, calls" in " ".join(rows[-1])


@pytest.mark.parametrize("width", [24, 40, 60, 80])
def test_view_on_a_narrow_screen_truncates_no_figure(width: int) -> None:
    out = io.StringIO()
    found = top.figures(pages(page(0, 0, 0), page(24_691_356, 0, 0, waiting=123456)))
    Console(file=out, width=width).print(top.view(found, "host:9090"))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for figure in ("generated 12345678 tok/s", "waiting 123456", "prompts 0 tok/s", "restarts 0"):
        assert sum(figure in line for line in lines) == 1


def test_top_without_a_server_names_the_cause(
    free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{free_port()}"
    assert main(["top", "--once", "--target", target]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"npuserve top: http://{target}/metrics: no server answers there (Connection refused)")


def test_top_live_continues_after_a_failed_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrapes are a page, a failure, a page, and Ctrl-C."""
    answers: list[object] = [page(1, 0, 0), top.Unreadable("away"), page(2, 0, 0), KeyboardInterrupt()]

    def read(url: str) -> Page:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return pages(str(answer), str(answer)).after

    seen: list[float] = []
    monkeypatch.setattr(top, "read_page", read)
    monkeypatch.setattr(top, "view", lambda found, target: seen.append(found["seconds"]) or "")
    assert main(["top", "--interval", "0.1"]) == 0
    assert not answers
    assert len(seen) == 1


def test_top_ends_with_q_and_restores_the_terminal() -> None:
    with answering(200, page(1, 0, 0)) as url:
        keyboard, terminal = pty.openpty()
        before = termios.tcgetattr(terminal)
        # The terminal of a session of its own is its foreground.
        program = "import os, sys; os.setsid(); os.close(os.open(os.ttyname(0), os.O_RDWR)); "
        program += "from npuserve.cli.main import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", program, "top", "--target", url, "--interval", "60"],
            stdin=terminal, stdout=terminal, stderr=terminal)
        try:
            shown = b""
            while b"waiting 60 s" not in shown:
                shown += os.read(keyboard, 1 << 16)
            assert not termios.tcgetattr(terminal)[3] & termios.ICANON
            os.write(keyboard, b"q")
            assert process.wait(60) == 0
            assert termios.tcgetattr(terminal) == before
        finally:
            process.kill()
            process.wait()
            os.close(keyboard)
            os.close(terminal)
