"""Supervisor of the first host of a group, over processes of a fake engine."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.service.supervisor.test_supervisor import Run


@pytest.mark.slow
@pytest.mark.parametrize("load_seconds", [0.0, 0.001])
def test_supervisor_ends_if_its_group_does_not_meet_again_in_load_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_seconds: float
) -> None:
    """A LeaderWorkerSet then replaces the group. An engine that is unusable earlier is started again."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path, "live", "live exit:2 live", {
        "port": 0, "drain_seconds": 5, "tensor_parallel_size": 2, "load_seconds": load_seconds})
    try:
        run.until_up()
        run.until(lambda: run.said("^ready in"))
        os.kill(run.journal("engine", "started")[0][2]["pid"], signal.SIGKILL)
        if load_seconds:
            assert run.process.wait(60) == 2
            assert len(run.journal("engine", "started")) == 2
            assert run.said("the group is not complete again")
            assert not run.alive()
        else:
            run.until(lambda: len(run.said("^ready in")) == 2)
    finally:
        run.process.kill()
        run.process.wait()
        shutil.rmtree(run.folder(), ignore_errors=True)
