"""A request that kills its engine, by crash and by hang, in each phase: one run of bench/reliability/killer.py each.

They run with --full. By default test_deaths.py has a crash in decode among other streams, test_edge.py has the end of a
hanging engine, and tests/service/engine/test_crash_tracker.py has all kinds without processes.
"""

from __future__ import annotations

import pytest

from tests.support.benches import bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hang-prefill", "crash-prefill", "crash-decode", "hang-decode"])
def test_killer_among_innocents_is_found_within_three_lives(kind: str, pytestconfig: pytest.Config) -> None:
    streams = 32 if pytestconfig.getoption("--full") else 12
    killer = bench("reliability.killer")
    (one,) = killer.measure([kind], runs=1, streams=streams, tokens=300, flags=("--dtype", "float32"))
    assert one["wrong"] == []
    assert (one["status"], one["lives"]) == ("INTERNAL ENGINE_KILLER", 3)
