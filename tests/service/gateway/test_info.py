"""Descriptions of the server and the model. test_servicer.py tests them on a running server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from npuserve.service.config import ServerConfig
from npuserve.service.gateway import info
from npuserve.service.streams.engine_client import EngineClient


async def test_server_info_before_the_model_is_loaded(tmp_path: Path) -> None:
    found = info.server_info(ServerConfig(), EngineClient(str(tmp_path / "engine")), time.monotonic() - 1000, 0.0)
    assert (found.server_type, found.max_num_seqs, found.model_dtype) == ("npuserve", 0, "")
    assert 1000 <= found.uptime_seconds < 1100


@pytest.mark.parametrize("value", [None, True, -1, 1 << 31, [], ["0"], 1.5])
def test_id_that_is_no_token_id_is_0(value: object) -> None:
    assert info._id(value) == 0


@pytest.mark.parametrize("value", [0, 7, (1 << 31) - 1])
def test_id_is_the_first_of_a_list(value: int) -> None:
    assert info._id(value) == info._id([value, 9]) == value
