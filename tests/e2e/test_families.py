"""A family with a fixed state, served by gRPC: samples, prefix hits, and the death of its engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import ids_while_the_engine_is_killed
from tests.e2e.server import Server, request, serving
from tests.npu.model.test_layers import Oracle, prompts, save

pytestmark = pytest.mark.full  # by default test_hybrid.py, whose layers have a fixed state too

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Oracle]]:
    """Server whose processes import the toy families."""
    folder, hooks = (tmp_path_factory.mktemp(name) for name in ("model", "hooks"))
    oracle = Oracle("SummingForCausalLM", save(folder, "SummingForCausalLM"))
    (hooks / "sitecustomize.py").write_text("import tests.support.toy_families\n")
    environment = {**os.environ, "PYTHONPATH": f"{hooks}{os.pathsep}{ROOT}"}
    arguments = (str(folder), "--dtype", "float32", "--kv-cache-memory", "8MiB", "--max-num-batched-tokens", "32",
                 "--block-size", "16")
    with serving(*arguments, process={"env": environment}) as server:
        yield server, oracle


def test_tokens_equal_plain_torch_while_the_engine_is_killed(served: tuple[Server, Oracle]) -> None:
    server, oracle = served
    asks = prompts(8, seed=3)
    received = ids_while_the_engine_is_killed(server, asks, 150)
    assert received == [oracle.answer(tuple(prompt), 150) for prompt in asks]


def test_samples_and_prefix_hits_continue_a_copied_state(served: tuple[Server, Oracle]) -> None:
    server, oracle = served
    prompt = [token for part in prompts(3, seed=4) for token in part]
    expected = oracle.answer(tuple(prompt), 20)
    several, one = (server.stub.Generate(request(prompt, 20, ignore_eos=True, n=n), timeout=60) for n in (3, 1))
    assert [list(sample.token_ids) for sample in several.samples] == [expected] * 3
    assert list(one.token_ids) == expected
    assert one.finish.usage.cached_tokens > 0
