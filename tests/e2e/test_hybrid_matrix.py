"""Exactness of hybrids (Qwen3.5, dense and with experts) through gRPC: ids and log-probabilities as alone, bit for bit,
in any company.

The answers alone are computed by the first server of each kind of model, without prefix hits. Each server has another
token budget, and a cache that is too small for all requests at once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from npuserve.kernels import native
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving
from tests.support.hybrids import VOCABULARY, random_hybrid
from tests.support.mixtures import random_mixture
from tests.support.models import assert_greedy, saved

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native.available(), reason="the native kernels are not built")]

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "intermediate_size": 64}
"""Sizes that two ranks can divide."""
EXPERTS_SEED = 2
EXPERTS = {**HEADS, "hidden_size": 48, "head_dim": 32, "num_hidden_layers": 4, "num_experts": 8,
           "num_experts_per_tok": 3,
           "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"]}
"""Sizes of a mixture of experts of Qwen3.5, as HEADS."""
TOKENS = 24
TIMEOUT = 300
"""Seconds that an answer may take. With a budget of one token the last of 32 takes a minute on a busy machine."""
MESSAGE_END = 2
"""eos_token_id of the model."""
FLAGS = ("--dtype", "float32", "--block-size", "16", "--max-num-seqs", "32")

Numbers = list[tuple[int, float, tuple[float, ...]]]
"""Token, its log-probability, and those of the two most likely tokens, at each position of an answer."""


def chats() -> list[list[int]]:
    """Return 32 prompts: chats with one system prompt of which some continue others, and unrelated prompts."""
    draw = random.Random(5)

    def message(length: int) -> list[int]:
        return [*draw.choices(range(3, VOCABULARY), k=length), MESSAGE_END]

    system = message(37)
    prompts = []
    for _ in range(8):
        chat = [*system, *message(draw.randint(5, 40))]
        prompts += [chat, [*chat, *message(draw.randint(5, 30)), *message(draw.randint(20, 40))]]
    return prompts + [message(draw.choice([1, 15, 16, 17, 31, 32, 33, 90, 120])) for _ in range(16)]


PROMPTS = chats()

FLOATS = [("experts", 32), *(pytest.param(*case, marks=pytest.mark.full) for case in (
    ("experts", 7), ("experts two ranks", 32), ("one rank", 512), ("one rank", 1), ("one rank", 7), ("one rank", 32),
    ("two ranks", 7), ("two ranks", 32)))]
W8A8 = [pytest.param("w8a8", budget, marks=pytest.mark.full) for budget in (512, 32)]
in_any_company = pytest.mark.parametrize(("kind", "budget"), [*FLOATS, *W8A8], indirect=True, scope="module")
"""Kinds of models, and tokens of a step of the server: by default one. Of the others, tests/npu/execution and
tests/npu/test_parallel.py compare answers without a server."""


@dataclass(frozen=True)
class Kind:
    """A model, how it is served, and its answers alone.

    flags: of the ranks.
    model: the reference of greedy ids; None for W8A8.
    """

    folder: Path
    ranks: int
    flags: tuple[str, ...]
    model: PreTrainedModel | None
    alone: list[Numbers] = field(default_factory=list)


def numbers(positions: list[pb.PositionLogprobs]) -> Numbers:
    return [(position.chosen.token_id, position.chosen.logprob, tuple(top.logprob for top in position.top))
            for position in positions]


def ask(prompt: list[int], **fields: object) -> pb.GenerateRequest:
    return request(prompt, TOKENS, ignore_eos=True, logprobs=2, **fields)


def answered(server: Server, prompt: list[int], **fields: object) -> Numbers:
    return numbers(server.stub.Generate(ask(prompt, **fields), timeout=TIMEOUT).logprobs)


def together(server: Server) -> list[Numbers]:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(partial(answered, server), PROMPTS))


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    experts = request.param.startswith("experts")
    model = random_mixture(EXPERTS_SEED, **EXPERTS) if experts else random_hybrid(0, **HEADS)
    folder = saved(model, tmp_path_factory.mktemp("model"))
    if request.param == "w8a8":
        target = tmp_path_factory.mktemp("w8a8") / "model"
        quantize_checkpoint(folder, target)
        folder = target
    ranks = 1 + request.param.endswith("two ranks")
    flags = ("--tensor-parallel-size", str(ranks), *(["--expert-parallel"] if experts and ranks > 1 else []))
    return Kind(folder, ranks, flags, None if request.param == "w8a8" else model)


@pytest.fixture(scope="module", name="budget")
def budget_parameter(request: pytest.FixtureRequest) -> int:
    budget: int = request.param
    return budget


@pytest.fixture(scope="module")
def served(kind: Kind, budget: int) -> Iterator[Server]:
    memory = f"{512 // kind.ranks}KiB"
    with serving(str(kind.folder), *FLAGS, *kind.flags, "--kv-cache-memory", memory, "--max-num-batched-tokens",
                 str(budget), "--max-model-len", "256") as server:
        if not kind.alone:
            kind.alone.extend(answered(server, prompt, bypass_prefix_cache=True) for prompt in PROMPTS)
        yield server


@pytest.mark.parametrize(("kind", "budget"), FLOATS, indirect=True, scope="module")
@pytest.mark.usefixtures("served")
def test_greedy_ids_alone_equal_transformers(kind: Kind) -> None:
    assert kind.model
    for prompt, alone in zip(PROMPTS, kind.alone, strict=True):
        assert_greedy(kind.model, prompt, [token for token, *_ in alone], TOKENS)


@in_any_company
def test_answers_among_32_with_prefix_hits_and_preemption_equal_those_alone(
    kind: Kind, served: Server, budget: int
) -> None:
    assert together(served) == kind.alone
    assert together(served) == kind.alone
    assert served.metric("npuserve_prefix_cache_hits_total") > 0
    assert served.metric("npuserve_preemptions_total") > 0 or budget < 32  # few requests run at a time
    assert served.metric("npuserve_state_slots", state="used") == 0


@in_any_company
def test_answers_from_the_prefix_cache_equal_those_computed(kind: Kind, served: Server) -> None:
    cached = 0
    # One chat of each pair, and every second of the unrelated prompts.
    for prompt, alone in zip(PROMPTS[1::2], kind.alone[1::2], strict=True):
        for _ in range(2):
            answer = served.stub.Generate(ask(prompt), timeout=TIMEOUT)
            assert numbers(answer.logprobs) == alone
        cached += answer.finish.usage.cached_tokens
    assert cached > sum(map(len, PROMPTS[1::2])) // 2


@in_any_company
def test_samples_equal_requests_of_their_own(kind: Kind, served: Server) -> None:
    for prompt in PROMPTS[::8]:
        several = served.stub.Generate(ask(prompt, n=3, temperature=1.0, seed=7), timeout=TIMEOUT).samples
        alone = [answered(served, prompt, temperature=1.0, seed=7 + index, bypass_prefix_cache=True)
                 for index in range(3)]
        assert [numbers(sample.logprobs) for sample in several] == alone


@in_any_company
def test_answers_while_the_engine_is_killed_equal_those_alone(kind: Kind, served: Server) -> None:
    restarts = served.metric("npuserve_engine_restarts_total")

    def streamed(index: int) -> Numbers:
        """Return the answer. A request that arrives during the restart is refused, and sent again."""
        received: Numbers = []
        try:
            for part in served.stub.StreamGenerate(ask(PROMPTS[index]), timeout=TIMEOUT):
                if index == 0 and part.logprobs and not received:
                    os.kill(engine_of(served), signal.SIGKILL)
                received += numbers(part.logprobs)
        except grpc.RpcError as error:
            if received or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            time.sleep(0.1)
            return streamed(index)
        return received

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(streamed, range(len(PROMPTS)))) == kind.alone
    until(lambda: served.metric("npuserve_engine_restarts_total") == restarts + 1, served)
