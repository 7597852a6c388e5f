"""Streams of a server with slow steps: deadlines are kept, and clients receive progress."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest

from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2
from tests.e2e import brittle
from tests.e2e.brittle import BRITTLE, COUNTING
from tests.e2e.server import Server, request, serving

REQUESTS = 8
STEP_SECONDS = 0.3


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the seconds that each step takes longer while it exists."""
    monkeypatch.setenv(brittle.SLOW, str(tmp_path / "slow"))
    return tmp_path / "slow"


@pytest.fixture
def server(slow: Path) -> Iterator[Server]:
    """Server that has not measured a step. 16 decode rows are a quarter of its token budget."""
    with serving("--max-num-seqs", "17", "--max-num-batched-tokens", "64", **COUNTING) as server:
        yield server


@pytest.mark.slow
def test_stream_of_slow_steps_ends_by_its_deadline_with_a_finish(server: Server, slow: Path) -> None:
    """All requests arrive before the first gap between tokens is measured. Their deadlines are spread over one step."""
    slow.write_text(str(STEP_SECONDS))

    def reason(number: int) -> int:
        deadline = 10 * STEP_SECONDS + number * STEP_SECONDS / REQUESTS
        *_, last = server.stub.StreamGenerate(request("Once upon a time", 400, ignore_eos=True), timeout=deadline)
        assert 0 < last.finish.usage.generated_tokens < 400
        return last.finish.reason

    with ThreadPoolExecutor(REQUESTS) as threads:
        assert list(threads.map(reason, range(REQUESTS))) == [pb.FINISH_REASON_DEADLINE] * REQUESTS


@pytest.mark.full
def test_stream_of_special_tokens_sends_progress_each_second(slow: Path) -> None:
    """Each progress message has at most the tokens of one second."""
    slow.touch()
    with serving(**BRITTLE) as server:
        (end,) = server.stub.GetModelInfo(model_pb2.GetModelInfoRequest()).eos_token_ids
        asked = request("Once upon a time", 40, ignore_eos=True, logit_bias={end: 100.0})
        asked.output.return_token_ids = False
        *parts, last = server.stub.StreamGenerate(asked, timeout=100)
    assert last.finish.usage.generated_tokens == 40
    assert {part.text for part in [*parts, last]} == {""}
    assert [part.offset for part in [*parts, last]] == [*accumulate((part.num_tokens for part in parts), initial=0)]
    assert all(0 < part.num_tokens <= 1 / brittle.SLOW_SECONDS for part in parts)
    assert 0 <= last.num_tokens <= 1 / brittle.SLOW_SECONDS


@pytest.mark.full
def test_deadline_that_can_be_met_beside_many_decode_rows_is_accepted(server: Server, slow: Path) -> None:
    """The prompt takes 9 steps. If steps of 16 decode rows counted as prefill, the estimate would be 25.

    The deadline is 20 steps, so that a stall of the machine cannot miss it.
    """
    *_, first = server.stub.StreamGenerate(request([7] * 300, 2, ignore_eos=True), timeout=100)
    assert first.finish.reason == pb.FINISH_REASON_LENGTH
    slow.write_text(str(STEP_SECONDS))
    rows = [server.stub.StreamGenerate(request([5, number], 400, ignore_eos=True)) for number in range(16)]
    measured = 0
    for part in rows[-1]:
        measured += part.num_tokens if server.stub.GetLoad(model_pb2.GetLoadRequest()).running == len(rows) else 0
        if measured >= 20:
            break
    asked = request([9 + number % 50 for number in range(400)], 2, ignore_eos=True)
    *_, last = server.stub.StreamGenerate(asked, timeout=20 * STEP_SECONDS)
    assert last.finish.reason == pb.FINISH_REASON_LENGTH
    for call in rows:
        call.cancel()
