"""How a call that the client ended is counted. The rest of call.py is tested through the servicers."""

from __future__ import annotations

import pytest

from npuserve.service.rpc.call import gone


@pytest.mark.parametrize(("left", "allowed", "code"), [
    (None, None, "CANCELLED"),
    (5.0, 10.0, "CANCELLED"),
    (0.5, 10.0, "CANCELLED"),
    (-0.001, 10.0, "DEADLINE_EXCEEDED"),
    (0.0, 0.3, "DEADLINE_EXCEEDED"),
    (0.005, 0.3, "DEADLINE_EXCEEDED"),
    (0.9, 120.0, "DEADLINE_EXCEEDED"),
])
def test_a_client_is_a_little_ahead_of_its_deadline(left: float | None, allowed: float | None, code: str) -> None:
    assert gone(left, allowed) == code
