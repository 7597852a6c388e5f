"""Parts of the engine process: the order to stop, the streams that a server kept when it stopped, and the profiler."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.npu import storyteller
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine import process
from npuserve.service.engine.process import EngineArgs, StopOrder, build_engine, load_streams, open_profiler
from npuserve.service.streams.records import FILE
from tests.support.counting_runner import ServedRunner
from tests.support.fake_engine import INFO

NO_UTF8 = b"\x92\xa2\xff\xff\x90"


@pytest.mark.parametrize("steps", [("give", "attach"), ("attach", "give")])
def test_stop_order_before_or_after_the_load_stops_the_engine(steps: tuple[str, str]) -> None:
    stops: list[str] = []
    engine: Any = SimpleNamespace(stop=lambda: stops.append("stopped"))
    order = StopOrder()
    for step in steps:
        assert not stops
        order.give() if step == "give" else order.attach(engine)
    assert stops == ["stopped"]


def test_streams_are_saved_before_anything_that_may_hang_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def ends(name: str, method: str = "close") -> Any:
        return SimpleNamespace(**{method: lambda *_: order.append(name)})

    engine = SimpleNamespace(run=lambda: order.append("loop"), profiles=ends("profiles"), grammars=ends("grammars"))
    monkeypatch.setattr(process, "build", lambda _: (engine, ends("ranks", "stop")))
    monkeypatch.setattr(process, "save_streams", lambda *_: order.append("streams"))
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    monkeypatch.setattr(process.process_control, "request_slice", lambda: None)
    assert process.serve(Any, StopOrder()) == 0  # type: ignore[arg-type]
    assert order[:2] == ["loop", "streams"]
    assert sorted(order[2:]) == ["grammars", "profiles", "ranks"]


@pytest.mark.parametrize(("epoch", "frontends"), [(1, 0), (2, 3)])
def test_kept_streams_are_loaded_once_the_start_can_no_longer_fail(
    monkeypatch: pytest.MonkeyPatch, epoch: int, frontends: int
) -> None:
    """Their file is removed then. A restarted engine also waits for the front ends."""
    order: list[str] = []

    def spied(name: str) -> Any:
        return lambda *_, **options: order.append(f"{name} {options.get('frontends', '')}")

    monkeypatch.setattr(process.signal, "signal", lambda *call: order.append(f"{call[0].name} {call[1].name}"))
    for name in ("load_streams", "CrashTracker", "EngineSocket", "open_profiler", "Engine"):
        monkeypatch.setattr(process, name, spied(name))
    runner: Any = ServedRunner(storyteller.FOLDER, 0.0)
    build_engine(EngineArgs(ServerConfig(frontends=3), "", "", epoch), runner, None, 0.0)
    assert order[-3:] == ["SIGTERM SIG_IGN", "load_streams ", f"Engine {frontends}"]


def test_engine_date_does_not_go_back_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first number of KV events, which may not go back, is made of it."""
    started = time.monotonic() - 60
    dates = []
    for now in (1.7e9, 1.7e9 - 7200, 1.7e9 + 7200):
        monkeypatch.setattr(process.clock, "unix_time", lambda now=now: now)
        dates.append(EngineArgs(ServerConfig(), "", "", 1, start_date=1.6e9, started=started).date)
        assert EngineArgs(ServerConfig(), "", "", 1).date == now
    assert dates == sorted(dates)
    assert all(60 <= date - 1.6e9 < 600 for date in dates)


@pytest.mark.parametrize(
    "content", [b"", b"damaged", NO_UTF8, hashlib.blake2b(NO_UTF8, digest_size=32).digest() + NO_UTF8])
def test_load_streams_damaged_file_is_logged_and_dropped(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with caplog.at_level(logging.ERROR):
        records = load_streams(ServerConfig(state_folder=str(tmp_path), resume_seconds=60.0), INFO, "/m")
    assert records.ended(0.0) == []
    assert [record.getMessage() for record in caplog.records] == ["the streams that were kept are lost"]
    assert list(tmp_path.iterdir()) == []


def test_profile_dir_that_is_unusable_at_a_restart_turns_profiles_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    config = ServerConfig(profile_dir=str(tmp_path / "file"))
    first, second = (SimpleNamespace(config=config, epoch=epoch) for epoch in (1, 2))
    with pytest.raises(ConfigError, match=r"profile_dir: .*file cannot be used: File exists"):
        open_profiler(first, None, None)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        assert open_profiler(second, None, None) is None  # type: ignore[arg-type]
    assert "profiles are off until the next start of the engine" in caplog.text
