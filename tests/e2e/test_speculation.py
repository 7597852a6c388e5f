"""Speculative decoding through a real server: equal answers with drafts and without, also across an engine's death."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from npuserve.npu import storyteller
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.brittle import BRITTLE
from tests.e2e.server import Server, request, serving
from tests.support.benches import bench

pytestmark = pytest.mark.slow

PHRASE = "the little cat and the big dog ran to the tree. "


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    """Module bench/reliability/kills.py."""
    return bench("reliability.kills")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--dtype", "float32", "--debuggable", "--speculate", "suffix", **BRITTLE) as running:
        yield running


def without_drafts(asked: pb.GenerateRequest) -> pb.GenerateRequest:
    copied = pb.GenerateRequest()
    copied.CopyFrom(asked)
    copied.scheduling.speculate = False
    return copied


@pytest.mark.full
def test_drafts_are_accepted_and_reported(server: Server) -> None:
    """By default test_hybrid.py has drafts of a head."""
    asked = request(PHRASE * 4, 60, ignore_eos=True, temperature=0, logprobs=1, return_token_ids=True)
    drafted = server.stub.Generate(asked, timeout=60)
    plain = server.stub.Generate(without_drafts(asked), timeout=60)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert plain.finish.usage.drafted_tokens == 0
    usage = drafted.finish.usage
    assert 0 < usage.accepted_draft_tokens <= usage.drafted_tokens
    assert usage.generated_tokens == plain.finish.usage.generated_tokens == 60
    assert server.metric("npuserve_accepted_draft_tokens_total", kind="suffix") >= usage.accepted_draft_tokens
    assert server.metric("npuserve_undrafted_tokens_total", reason="request") >= 60


@pytest.mark.full
def test_streams_with_drafts_survive_a_killed_engine(server: Server, kills: ModuleType) -> None:
    """By default test_hybrid.py kills an engine that drafts."""
    wanted = kills.asks(8, 150)
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda ask: kills.stream(server.stub, without_drafts(ask)), wanted))
    before = server.metric("npuserve_draft_tokens_total", kind="suffix")
    killer = kills.Killer(server.target, server.process.pid, 1, (0.2, 0.8), seed=3)
    wrong, answers = kills.disturbed(server.target, killer, wanted, alone)
    assert wrong == []
    assert len(answers) >= len(wanted)
    assert len(killer.killed) == 1
    assert server.metric("npuserve_streams_continued_total", after="engine") > 0
    assert server.metric("npuserve_draft_tokens_total", kind="suffix") > before
    assert server.metric("npuserve_requests_running") == 0
    assert server.metric("npuserve_kv_cache_usage_ratio") == 0


@pytest.mark.full
def test_smaller_model_drafts() -> None:
    """By default without a server in tests/npu/execution/test_predictor.py.

    The built-in model drafts for itself. Samples at this temperature often differ from its drafts.
    """
    asked = request(PHRASE, 60, ignore_eos=True, temperature=0.8, seed=3, logprobs=1, return_token_ids=True)
    with serving("--dtype", "float32", "--speculate", str(storyteller.FOLDER), "--draft-depth", "2") as server:
        drafted = server.stub.Generate(asked, timeout=60)
        plain = server.stub.Generate(without_drafts(asked), timeout=60)
        assert drafted.token_ids == plain.token_ids
        assert drafted.logprobs == plain.logprobs
        usage = drafted.finish.usage
        assert 0 < usage.accepted_draft_tokens < usage.drafted_tokens
        assert server.metric("npuserve_accepted_draft_tokens_total", kind="model") == usage.accepted_draft_tokens
