"""Parts of the engine process: the streams that a server kept when it stopped."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from npuserve.service.config import ServerConfig
from npuserve.service.engine.process import load_streams
from npuserve.service.ipc.resumable_streams import FILE
from tests.support.fake_engine import INFO

NO_UTF8 = b"\x92\xa2\xff\xff\x90"


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
