"""Qwen3.5 by gRPC: tokens of transformers with 1 and 2 ranks, samples, prefix hits, and a killed engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from npuserve.kernels import native
from tests.e2e.processes import ids_while_the_engine_is_killed
from tests.e2e.server import Server, request, serving
from tests.support.hybrids import VOCABULARY, prompts, random_hybrid
from tests.support.models import greedy, saved

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native.available(), reason="the native kernels are not built")]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "intermediate_size": 64}
"""Sizes that two ranks can divide."""


@pytest.fixture(scope="module", params=[
    pytest.param(1, id="alone", marks=pytest.mark.full),  # test_families.py kills the engine of another such model
    pytest.param(2, id="two ranks")])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[
        tuple[Server, PreTrainedModel]]:
    model = random_hybrid(0, **HEADS)
    folder: Path = saved(model, tmp_path_factory.mktemp("model"))
    with serving(str(folder), "--dtype", "float32", "--kv-cache-memory", "16MiB", "--block-size", "16",
                 "--max-num-batched-tokens", "32", "--tensor-parallel-size", str(request.param)) as server:
        yield server, model


def test_tokens_equal_transformers_while_the_engine_is_killed(served: tuple[Server, PreTrainedModel]) -> None:
    server, model = served
    asks = prompts(6, 3)
    received = ids_while_the_engine_is_killed(server, asks, 120)
    assert received == [greedy(model, prompt, 120) for prompt in asks]


def test_samples_and_prefix_hits_continue_a_state(served: tuple[Server, PreTrainedModel]) -> None:
    server, model = served
    prompt = random.Random(2).choices(range(3, VOCABULARY), k=75)
    expected = greedy(model, prompt, 20)
    several, one = (server.stub.Generate(request(prompt, 20, ignore_eos=True, n=n), timeout=60) for n in (3, 1))
    assert [list(sample.token_ids) for sample in several.samples] == [expected] * 3
    assert list(one.token_ids) == expected
    assert one.finish.usage.cached_tokens == 64
    assert server.metric("npuserve_state_slots", state="used") == 0
    assert server.metric("npuserve_state_slots", state="checkpoint") > 0
