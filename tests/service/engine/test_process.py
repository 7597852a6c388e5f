"""Parts of the engine process: the order to stop and the profiler."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.npu import storyteller
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.engine import process
from npuserve.service.engine.process import EngineArgs, StopOrder, build_engine, drafting_of, open_profiler
from npuserve.service.speculation.speculator import StepTokens
from tests.support.counting_runner import ServedRunner


@pytest.mark.parametrize("steps", [("give", "attach"), ("attach", "give")])
def test_stop_order_before_or_after_the_load_stops_the_engine(steps: tuple[str, str]) -> None:
    stops: list[str] = []
    engine: Any = SimpleNamespace(stop=lambda: stops.append("stopped"))
    order = StopOrder()
    for step in steps:
        assert not stops
        order.give() if step == "give" else order.attach(engine)
    assert stops == ["stopped"]


@pytest.mark.parametrize(("epoch", "frontends"), [(1, 0), (2, 3)])
def test_restarted_engine_waits_for_the_front_ends_with_sigterm_ignored(
    monkeypatch: pytest.MonkeyPatch, epoch: int, frontends: int
) -> None:
    order: list[str] = []

    def spied(name: str) -> Any:
        return lambda *_, **options: order.append(f"{name} {options.get('frontends', '')}")

    monkeypatch.setattr(process.signal, "signal", lambda *call: order.append(f"{call[0].name} {call[1].name}"))
    for name in ("CrashTracker", "EngineSocket", "open_profiler", "Engine"):
        monkeypatch.setattr(process, name, spied(name))
    runner: Any = ServedRunner(storyteller.FOLDER, 0.0)
    build_engine(EngineArgs(ServerConfig(frontends=3), "", "", epoch), runner, None, 0.0)
    assert order[-2:] == ["SIGTERM SIG_IGN", f"Engine {frontends}"]


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


@pytest.mark.parametrize(("config", "is_said"), [
    (ServerConfig(draft_depth=5), True),
    (ServerConfig(draft_depth=5, speculate="suffix"), True),
    (ServerConfig(speculate="suffix"), False),
])
def test_draft_depth_without_a_model_that_drafts_is_said(
    caplog: pytest.LogCaptureFixture, config: ServerConfig, is_said: bool
) -> None:
    runner: Any = SimpleNamespace(predicts=False, max_drafts=8, num_slots=0)
    with caplog.at_level(logging.WARNING):
        drafting_of(config, runner)
    assert ("draft_depth has no effect" in caplog.text) == is_said


@pytest.mark.parametrize(("limit", "is_said"), [(None, False), (64, False), (63, True)])
def test_steps_in_which_the_head_drafts_nothing_are_said(
    caplog: pytest.LogCaptureFixture, limit: int | None, is_said: bool
) -> None:
    runner: Any = SimpleNamespace(predicts=True, max_drafts=64, num_slots=0, max_drafted_samples=limit)
    with caplog.at_level(logging.WARNING):
        drafting = drafting_of(ServerConfig(max_num_seqs=64, speculate="mtp"), runner)
    assert ("no drafts of the head or smaller model in steps of more rows" in caplog.text) == is_said
    budgets = [drafting._budget(StepTokens(rows, rows), 512, is_beside_prompts=False) for rows in (10, 60, 64)]
    assert budgets == {None: [64, 64, 64], 64: [54, 4, 0], 63: [53, 3, 64]}[limit]


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
