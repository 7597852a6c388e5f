from __future__ import annotations

import pytest

from bench.serving.footprint import measure


@pytest.mark.slow
def test_footprint_server_that_does_not_start_ends_the_program():
    with pytest.raises(SystemExit, match=r"the server did not start:\n(.*\n)*.*--no-such-flag"):
        measure(["--no-such-flag"])
