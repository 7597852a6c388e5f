"""A request that kills its engine, in each phase and by crash and by hang: one run of bench/killer.py each."""

from __future__ import annotations

import pytest

from tests.benches import bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["crash-prefill", "hang-prefill", "crash-decode", "hang-decode"])
def test_killer_among_innocents_is_found_within_three_lives(kind: str) -> None:
    (one,) = bench("killer").measure([kind], runs=1, streams=32, tokens=300, flags=("--dtype", "float32"))
    assert one["wrong"] == []
    assert (one["status"], one["lives"]) == ("INTERNAL ENGINE_KILLER", 3)
