"""Qwen3.5 by gRPC: tokens of transformers with 1 and 2 ranks, samples, prefix hits, and a killed engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedModel

from npuserve.kernels import native
from tests.e2e.processes import ids_while_the_engine_is_killed
from tests.e2e.server import Server, request, serving
from tests.support.hybrids import VOCABULARY, prompts, random_hybrid
from tests.support.models import assert_greedy, saved
from tests.support.mtp import add_likely_mtp, damped

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native.available(), reason="the native kernels are not built")]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "intermediate_size": 64}
"""Sizes that two ranks can divide."""


class Served(NamedTuple):
    """A server. speculate: its setting."""

    server: Server
    model: PreTrainedModel
    speculate: str


@pytest.fixture(scope="module", params=[
    pytest.param((1, "off"), id="alone", marks=pytest.mark.full),
    pytest.param((1, "suffix"), id="drafts", marks=pytest.mark.full),  # test_quantized.py: with another model
    pytest.param((1, "mtp"), id="head"),
    pytest.param((2, "off"), id="two ranks", marks=pytest.mark.full),
    pytest.param((2, "suffix"), id="two ranks, drafts", marks=pytest.mark.full),
    pytest.param((2, "mtp"), id="two ranks, head", marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ranks, speculate = request.param
    model = damped(random_hybrid(0, **HEADS, num_hidden_layers=4, full_attention_interval=2))
    folder: Path = saved(model, tmp_path_factory.mktemp("model"))
    add_likely_mtp(model, folder)
    with serving(str(folder), "--dtype", "float32", "--kv-cache-memory", "16MiB", "--block-size", "16",
                 "--max-num-batched-tokens", "32", "--max-num-seqs", "16", "--tensor-parallel-size", str(ranks),
                 "--speculate", speculate) as server:
        yield Served(server, model, speculate)


def test_tokens_equal_transformers_while_the_engine_is_killed(served: Served) -> None:
    server, model, speculate = served
    asks = prompts(6, 3)
    received = ids_while_the_engine_is_killed(server, asks, 120)
    for prompt, answer in zip(asks, received, strict=True):
        assert_greedy(model, prompt, answer, 120)
    if speculate == "mtp":
        usages = [server.stub.Generate(request(prompt, 120, ignore_eos=True), timeout=60).finish.usage
                  for prompt in asks]
        drafted, accepted = (sum(getattr(usage, name) for usage in usages)
                             for name in ("drafted_tokens", "accepted_draft_tokens"))
        assert drafted >= accepted > 100
        assert server.metric("npuserve_accepted_draft_tokens_total", kind="mtp") > 100
    if speculate == "suffix":  # the answers of the first time are the drafts of the second
        for prompt, answer in zip(2 * asks[:3], 2 * received[:3], strict=True):
            again = server.stub.Generate(request(prompt, 120, ignore_eos=True), timeout=60)
            assert list(again.token_ids) == answer
        assert again.finish.usage.drafted_tokens >= again.finish.usage.accepted_draft_tokens > 60


def test_samples_and_prefix_hits_continue_a_state(served: Served) -> None:
    server, model, _ = served
    prompt = random.Random(2).choices(range(3, VOCABULARY), k=75)
    several, one = (server.stub.Generate(request(prompt, 20, ignore_eos=True, n=n), timeout=60) for n in (3, 1))
    assert_greedy(model, prompt, list(one.token_ids), 20)
    assert [list(sample.token_ids) for sample in several.samples] == [list(one.token_ids)] * 3
    assert one.finish.usage.cached_tokens == 64
    assert server.metric("npuserve_state_slots", state="used") == 0
    assert server.metric("npuserve_state_slots", state="checkpoint") > 0
