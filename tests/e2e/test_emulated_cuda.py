"""A server on an emulated GPU, as `npuserve serve --device cuda --emulate` starts it.

Triton's interpreter runs the kernels of whole steps.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.serving.server import ranks_of
from tests.e2e.processes import engine_of, ids_while_the_engine_is_killed
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_ranks import is_alive
from tests.npu.backends.mtp import add_head
from tests.npu.backends.small import saved
from tests.support.real_models import model_folder, published

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")]

LIMITS = ("--dtype", "float32", "--max-num-batched-tokens", "8", "--max-num-seqs", "2", "--block-size", "16")
PROMPTS = [[1, 43, 47, 61, 78, 44, 91], [1, 43, 47, 12, 9], [1, 30, 20, 4, 77, 8, 13, 5, 11, 61, 17, 33, 2, 90]]
ANSWER = 6


# transformers, which makes these models, is imported where one is needed: by no test of the default run.


def saved_hybrid(folder: Path) -> Path:
    """Save a Qwen3.5 of one layer of each kind."""
    from tests.support.hybrids import random_hybrid
    from tests.support.models import saved

    return saved(random_hybrid(0, num_hidden_layers=2, full_attention_interval=2, linear_num_key_heads=1), folder)


def saved_mixture(folder: Path) -> Path:
    """Save a Qwen3.5 of such layers, with experts."""
    from tests.support.mixtures import random_mixture
    from tests.support.models import saved

    model = random_mixture(2, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=4,
                           num_experts_per_tok=2)
    return saved(model, folder)


def tokens(server: Server, number: int = 4) -> Iterator[list[int]]:
    """Yield the tokens of the first requests, sent concurrently: all prompts, and one of them sampled."""
    asks = [request(prompt, ANSWER, ignore_eos=True) for prompt in PROMPTS]
    asks.append(request(PROMPTS[0], ANSWER, ignore_eos=True, temperature=1.5, seed=7, top_k=50))
    asks = asks[:number]
    with ThreadPoolExecutor(len(asks)) as pool:
        for _, ids, finish in pool.map(lambda ask: streamed(server.stub, ask), asks):
            assert len(ids) == finish.usage.generated_tokens == ANSWER
            yield ids


def samples(server: Server) -> list[list[int]]:
    """Return the tokens of three samples of one call, more than the server computes at a time."""
    ask = request(PROMPTS[2], ANSWER, n=3, ignore_eos=True, temperature=1.5, seed=7, top_k=50)
    made = [list(each.token_ids) for each in server.stub.Generate(ask, timeout=300).samples]
    assert len(set(map(tuple, made))) == ask.n
    return made


def served_by_cpu(folder: str) -> list[list[int]]:
    with serving(folder, "--device", "cpu", *LIMITS) as cpu:
        return list(tokens(cpu))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """Folder of a random model, and the CPU's tokens."""
    folder = str(saved(tmp_path_factory.mktemp("model"), layers=1))
    return folder, served_by_cpu(folder)


@pytest.mark.full  # by default a server of ranks answers, and tests/npu/backends/cuda has steps
@pytest.mark.parametrize("name", ["random", "hybrid", *published("stories260K-qwen3")])
def test_tokens_are_those_of_the_cpu_in_float32(
    random_model: tuple[str, list[list[int]]], name: str, tmp_path: Path
) -> None:
    folder, expected = random_model
    if name != "random":
        folder = str(saved_hybrid(tmp_path) if name == "hybrid" else model_folder(name))
        expected = served_by_cpu(folder)
    with serving(folder, "--device", "cuda", "--emulate", "--decode-buckets", "2", *LIMITS) as cuda:
        got = list(tokens(cuda))
        assert "emulated CUDA: proves calls and numbers, not speed" in cuda.log
        assert "captured mixed steps of 1, 2, 4, 8 tokens" in cuda.log
        captured, decoder = (cuda.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "decoder"))
        assert captured > 0
        assert captured + decoder >= 4 * (ANSWER - 1)  # the sampler is not captured on CUDA
        assert cuda.stop() == 0
    assert got == expected


@pytest.mark.full
@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_samples_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Samples share the prompt's blocks, and each continues a copy of its state. A model with experts also has a shared
    one and linear attention."""
    folder = str((saved_hybrid if name == "hybrid" else saved_mixture)(tmp_path))
    found = []
    for device in (("--device", "cpu"), ("--device", "cuda", "--emulate", "--decode-buckets", "2")):
        with serving(folder, *device, *LIMITS) as server:
            found.append([*tokens(server, 2), *samples(server)])
    assert found[0] == found[1]


@pytest.mark.full
def test_tokens_of_a_head_with_experts_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Rows of up to 3 tokens are verified, and drafts made, in captured steps."""
    folder = str(add_head(saved_mixture(tmp_path), damping=0.2))
    expected = served_by_cpu(folder)
    with serving(folder, "--device", "cuda", "--emulate", "--decode-buckets", "2", *LIMITS, "--speculate", "mtp",
                 "--draft-depth", "2", "--kernel-sampling", "0") as cuda:
        assert list(tokens(cuda)) == expected
        drafted, accepted = (cuda.metric(f"npuserve_{name}_tokens_total", kind="mtp")
                             for name in ("draft", "accepted_draft"))
        assert 0 < accepted < drafted
        captured, eager = (cuda.metric("npuserve_step_seconds_count", mode=mode) for mode in ("captured", "eager"))
        assert captured > 0 == eager


@pytest.mark.full
def test_hybrid_continues_after_its_engine_is_killed(tmp_path: Path) -> None:
    """States are computed again. By default the CPU's server has such a death (test_hybrid.py)."""
    folder = str(saved_hybrid(tmp_path))
    expected = served_by_cpu(folder)[:2]
    with serving(folder, "--device", "cuda", "--emulate", "--decode-buckets", "2", *LIMITS) as cuda:
        assert ids_while_the_engine_is_killed(cuda, PROMPTS[:2], ANSWER) == expected


@pytest.mark.full
def test_states_return_from_host_memory_until_the_engine_dies(tmp_path: Path) -> None:
    """The cache holds the blocks of two prompts, of which four return."""
    folder = str(saved_hybrid(tmp_path))
    prompts = [random.Random(seed).choices(range(3, 100), k=36) for seed in range(4)]

    def answers(server: Server, **fields: object) -> list[tuple[list[int], int]]:
        """Return ids and cached tokens of the answer to each prompt."""
        asks = [request(prompt, 2, ignore_eos=True, **fields) for prompt in prompts]
        return [(ids, finish.usage.cached_tokens) for _, ids, finish in (streamed(server.stub, ask) for ask in asks)]

    with serving(folder, "--device", "cuda", "--emulate", "--decode-buckets", "1", *LIMITS, "--max-num-seqs", "1",
                 "--max-model-len", "48", "--kv-cache-memory", "64KiB", "--kv-offload-memory", "4MiB") as server:
        expected = [ids for ids, _ in answers(server, bypass_prefix_cache=True)]
        assert [ids for ids, _ in answers(server)] == expected
        assert answers(server) == [(ids, 32) for ids in expected]
        assert server.metric("npuserve_kv_offload_hits_total") >= 2 * 32
        assert server.metric("npuserve_kv_offload_corrupt_blocks_total") == 0
        (answer,) = ids_while_the_engine_is_killed(server, prompts[:1], 8)  # long enough to end in the next engine
        assert answer[:2] == expected[0]
        assert [ids for ids, _ in answers(server)] == expected


RANKS = ("--device", "cuda", "--emulate", "--decode-buckets", "2", "--tensor-parallel-size", "2", *LIMITS)


@pytest.fixture(scope="module")
def ranks(random_model: tuple[str, list[list[int]]]) -> Iterator[Server]:
    """Server of two ranks, each with an emulated GPU, shared by the next tests."""
    with serving(random_model[0], *RANKS, "--hang-seconds", "20") as server:
        yield server


def test_ranks_answer_as_the_cpu_does(ranks: Server, random_model: tuple[str, list[list[int]]]) -> None:
    """In captured steps."""
    assert "emulated CUDA: proves calls and numbers, not speed" in ranks.log
    assert "captured mixed steps of 1, 2, 4, 8 tokens" in ranks.log
    assert list(tokens(ranks)) == random_model[1]
    captured, decoder = (ranks.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "decoder"))
    assert captured > 0
    assert captured + decoder >= 4 * (ANSWER - 1)


def test_killed_rank_ends_the_group(ranks: Server, random_model: tuple[str, list[list[int]]]) -> None:
    engine, (rank,) = engine_of(ranks), ranks_of(ranks.process.pid)
    assert ids_while_the_engine_is_killed(ranks, PROMPTS[:2], ANSWER, rank) == random_model[1][:2]
    assert not is_alive(engine)


@pytest.mark.full
def test_stopped_rank_is_a_hang(ranks: Server, random_model: tuple[str, list[list[int]]]) -> None:
    """By default: a frozen engine (test_edge.py)."""
    restarts = ranks.metric("npuserve_engine_restarts_total")
    os.kill(ranks_of(ranks.process.pid)[0], signal.SIGSTOP)
    assert list(tokens(ranks, 1)) == random_model[1][:1]
    assert ranks.metric("npuserve_engine_restarts_total") == restarts + 1


def test_ranks_end_with_the_server(ranks: Server) -> None:
    """Last test of that server."""
    running = ranks_of(ranks.process.pid)
    assert len(running) == 1
    assert ranks.stop() == 0
    assert not any(map(is_alive, running))


@pytest.mark.full
def test_more_ranks_than_visible_gpus_are_refused(random_model: tuple[str, list[list[int]]]) -> None:
    """By default tests/npu/backends/cuda/test_ranks.py has the error, and test_ranks.py such a refusal."""
    server = Server(random_model[0], *RANKS, process={"env": {**os.environ, "CUDA_VISIBLE_DEVICES": "3"}})
    assert server.process.wait(100) == 2
    assert ("tensor_parallel_size: 2 ranks of this host need as many devices, and 1 is visible here "
            "(CUDA_VISIBLE_DEVICES); possible is 1 to 1 a host") in server.log
    assert "Traceback" not in server.log
