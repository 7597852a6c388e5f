"""Groups of ranks on emulated GPUs, each a process, compared with one process. Gloo stands for NCCL."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.kernels import collectives, triton
from npuserve.kernels.collectives import Ranks, all_reduce, linear_argmax_shard
from npuserve.kernels.linear import linear_argmax
from npuserve.npu.backends.base import BackendError, DeviceSettings
from npuserve.npu.backends.cuda.backend import CudaBackend
from npuserve.npu.backends.cuda.emulated_backend import EmulatedCuda
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.quantization.w8a8 import W8A8
from tests.npu.backends.small import saved
from tests.npu.rank import PROMPTS, Answers, reports
from tests.npu.test_parallel import GREEDY, MIXED, MIXTURES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CUDA: dict[str, Any] = {"backend": "cuda", "emulate": [], "decode_buckets": [3], "max_model_len": 64, "tokens": 6}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or not triton.available():
        pytest.skip("needs triton and TRITON_INTERPRET=1: see .ci/triton")
    monkeypatch.setattr(triton, "DEVICE", "cpu")


def assert_equal(found: Answers, wanted: Answers, tolerance: float) -> None:
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in wanted]
    for (_, *logprobs), (_, *expected) in zip(found, wanted, strict=True):
        assert [pytest.approx(part, abs=tolerance) for part in expected] == logprobs


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 300), pytest.param(4, 100, marks=pytest.mark.full)])
def test_answers_equal_those_of_the_cpu(tmp_path: Path, size: int, vocabulary: int) -> None:
    """Greedy, sampled, penalized and restricted requests, with chunks. Two of 4 ranks hold a KV head each, and 3 have
    no ids.

    The collectives are part of the graphs: emulated graphs rerun their step. The kernels of each third step are timed,
    one by one.
    """
    folder = saved(tmp_path, layers=1, vocabulary=vocabulary)
    found = reports(folder, size, MIXED, shared=False, counts=True, kernel_sampling=3, **CUDA)
    assert_equal(found.answers, reports(folder, 1, MIXED, tokens=6, max_model_len=64).answers, 1e-4)
    assert len(found.steps) > CUDA["tokens"]
    # The first step also returns prompt_logprobs.
    assert [step.gathers for step in found.steps] == [2 * 1 + 3, *[2 * 1 + 2] * (len(found.steps) - 1)]
    assert [step.captured for step in found.steps] == [i % 3 > 0 for i in range(len(found.steps))]


@pytest.mark.full  # test_large_sums_of_ranks_are_divided
@pytest.mark.parametrize("size", [2, 4])
def test_divided_sums_give_the_same_tokens(tmp_path: Path, size: int) -> None:
    """A sum is an all-to-all and an all-gather, within the graphs too."""
    folder = saved(tmp_path, layers=1)
    found = reports(folder, size, GREEDY, shared=False, counts=True, divides=True, **CUDA)
    assert {step.gathers for step in found.steps} == {2 * (2 * 1 + 1) + 1}
    assert {step.captured for step in found.steps} == {True}
    assert found.answers == reports(folder, 1, GREEDY, tokens=6, max_model_len=64).answers


@pytest.mark.parametrize("scheme", [
    pytest.param(W8A8(dynamic=False), id="int8", marks=pytest.mark.full),
    pytest.param(W8A8(dynamic=False, float8=True), id="float8", marks=pytest.mark.full),
    pytest.param(W8A8(per_channel=False, float8=True, blocks=True), id="blocks", marks=pytest.mark.full)])
def test_w8a8_with_int8_cache_equals_one_process(tmp_path: Path, scheme: W8A8) -> None:
    """Kernel by kernel: test_backend.py has captured steps. The scales of inputs are of the whole model, or of groups
    that no rank divides."""
    from tests.support.models import random_model, saved_w8a8

    sizes = {"head_dim": 64, "intermediate_size": 256} if scheme.blocks else {}
    folder = saved_w8a8(random_model("qwen3", num_hidden_layers=1, **sizes), tmp_path, scheme)
    settings = CUDA | {"kv_cache_dtype": "int8", "tokens": 3, "capture": "off"}
    alone, divided = (reports(folder, size, GREEDY, shared=False, **settings) for size in (1, 2))
    assert divided == alone
    assert {len(tokens) for tokens, *_ in divided.answers} == {3}
    assert len(divided.answers) == len(PROMPTS)


@pytest.mark.parametrize(("seed", "whole"), [
    pytest.param(seed, whole, id=f"{seed}-{divided}", marks=[] if (seed, whole) == (1, True) else pytest.mark.full)
    for seed in range(3) for divided, whole in (("rows", False), ("whole", True))])
def test_mixtures_of_experts_equal_one_process(tmp_path: Path, seed: int, whole: bool) -> None:
    """Each rank has a part of the rows of all experts, or whole ones. Those of seed 1 and 2 have a shared expert, and
    linear attention, whose heads are divided. Steps of the first are captured, those of the others kernel by kernel."""
    from tests.support.mixtures import random_mixture
    from tests.support.models import saved

    few = {"num_experts": 4, "num_experts_per_tok": 2}
    folder = saved(random_mixture(seed, **MIXTURES[seed], **few), tmp_path)
    is_captured = seed == 0 and not whole
    settings = CUDA | {"tokens": 3, "capture": "on" if is_captured else "off"}
    alone = reports(folder, 1, GREEDY, tokens=3, max_model_len=64).answers
    divided = reports(folder, 2, GREEDY, shared=False, counts=True, expert_parallel=whole, **settings)
    assert [tokens for tokens, *_ in divided.answers] == [tokens for tokens, *_ in alone]
    assert {step.captured for step in divided.steps} == {is_captured}


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "whole"])
def test_drafts_of_a_head_with_experts_change_no_token(tmp_path: Path, whole: bool) -> None:
    """Each rank has its part of the head's experts. A step and its drafts are captured."""
    from tests.support.mixtures import random_mixture
    from tests.support.models import saved
    from tests.support.mtp import add_likely_mtp, damped

    few = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_size": 32,
           "layer_types": ["linear_attention", "full_attention"]}
    model = damped(random_mixture(2, **MIXTURES[2] | few))
    add_likely_mtp(model, saved(model, tmp_path))
    settings = CUDA | {"tokens": 4, "mtp": "on", "max_drafts": 8, "draft_depth": 2, "capture": "on"}
    alone = reports(tmp_path, 1, GREEDY, tokens=4, max_model_len=64).answers
    divided = reports(tmp_path, 2, GREEDY, shared=False, counts=True, expert_parallel=whole, **settings)
    assert [tokens for tokens, *_ in divided.answers] == [tokens for tokens, *_ in alone]
    assert {step.captured for step in divided.steps} == {True}
    assert divided.accepted > 2


@pytest.mark.full
def test_hybrid_ranks_equal_one_process(tmp_path: Path) -> None:
    """Linear attention by heads, with states in slots, in captured steps."""
    from tests.support.hybrids import random_hybrid
    from tests.support.models import saved

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "num_hidden_layers": 2, "full_attention_interval": 2, "intermediate_size": 40}
    folder = saved(random_hybrid(0, **sizes), tmp_path)
    alone = reports(folder, 1, GREEDY, tokens=4, max_model_len=64).answers
    divided = reports(folder, 2, GREEDY, shared=False, counts=True, **(CUDA | {"tokens": 4}))
    assert [tokens for tokens, *_ in divided.answers] == [tokens for tokens, *_ in alone]
    assert {step.captured for step in divided.steps} == {True}


# Kernels with the tensors of several ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sum_of_ranks_is_that_of_the_golden_function(dtype: torch.dtype) -> None:
    parts = torch.randn(3, 5, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    ranks = Ranks(1, 3, gather=lambda x: parts)
    assert torch.equal(all_reduce.implementations["cuda"].function(parts[1], ranks), all_reduce(parts[1], ranks))


def test_large_sums_of_ranks_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds its part of all tensors, and gathers the other parts."""
    parts = torch.randn(3, 4, 750, generator=torch.Generator().manual_seed(1))
    wanted = all_reduce(parts[1], Ranks(1, 3, gather=lambda _: parts))
    calls: list[str] = []

    def exchange(x: torch.Tensor) -> torch.Tensor:
        calls.append("exchange")
        return parts.view(3, 3, -1)[:, 1].contiguous()

    def gather(x: torch.Tensor) -> torch.Tensor:
        calls.append("gather")
        if x.numel() == parts[1].numel():
            return parts
        assert torch.equal(x.view(-1), wanted.view(3, -1)[1])
        return wanted.view(3, 1, -1)

    ranks, add = Ranks(1, 3, gather, exchange), all_reduce.implementations["cuda"].function
    saved_bytes = 4 * 750 * 4 * 2 // 3
    for least, expected in ((saved_bytes, ["exchange", "gather"]), (saved_bytes + 1, ["gather"])):
        monkeypatch.setattr(collectives, "MIN_SAVED_BYTES", least)
        calls.clear()
        assert torch.equal(add(parts[1], ranks), wanted)
        assert calls == expected


def test_argmax_of_ranks_is_the_first_of_equal_values() -> None:
    """The last rank has no ids of the vocabulary."""
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(3 * 128, 16, generator=torch.Generator().manual_seed(2))
    weight[128:256] = weight[:128]
    sent: list[torch.Tensor] = []

    def send(x: torch.Tensor) -> torch.Tensor:
        sent.append(x)
        return torch.stack([x] * 3)

    def of(rank: int, ranks: Ranks) -> torch.Tensor:
        own = weight[128 * rank : 128 * (rank + 1)]
        return linear_argmax_shard.implementations["cuda"].function(
            hidden, own, None, (128, 100, 0)[rank], (0, 128, 228)[rank], ranks)

    for rank in range(3):
        of(rank, Ranks(rank, 3, gather=send))
    wanted = linear_argmax(hidden, weight, None, 228)
    assert int(wanted.max()) < 128
    assert torch.equal(of(0, Ranks(0, 3, gather=lambda _: torch.stack(sent))), wanted)


# Devices


def test_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert EmulatedCuda(DeviceSettings((1, 2))).settings.place == (1, 2)
    with pytest.raises(BackendError, match=r"^tensor_parallel_size: 3 ranks of this host need as many devices, and 2 "
                                           r"are visible here \(CUDA_VISIBLE_DEVICES\); possible is 1 to 2 a host$"):
        EmulatedCuda(DeviceSettings((0, 3)))


def test_torch_without_nccl_is_refused() -> None:
    backend = EmulatedCuda()
    backend.check_ranks(2)
    backend.capabilities = replace(backend.capabilities, collectives=CudaBackend.capabilities.collectives)
    backend.check_ranks(1)
    with pytest.raises(BackendError, match=r"^tensor_parallel_size: 2 is not possible, since this torch has no nccl"):
        backend.check_ranks(2)


def test_communicator_is_estimated_by_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EmulatedCuda()
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    assert (backend.communicator_bytes(1), backend.communicator_bytes(2)) == (0, 384 << 20)
    monkeypatch.setenv("NCCL_BUFFSIZE", str(1 << 20))
    assert backend.communicator_bytes(8) == 96 << 20


def test_plan_counts_gathered_tensors(tmp_path: Path) -> None:
    """The gathered tensors are each rank's hidden states of a step, and the logits of all rows."""
    config = ModelConfig.from_folder(saved(tmp_path, layers=1, vocabulary=300)).sharded(Shard(0, 2))
    settings: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    backend = EmulatedCuda(DeviceSettings((0, 2)))
    found = predict(config, backend, **settings)
    backend.capabilities = replace(backend.capabilities, shares_memory=True)
    without = predict(config, backend, **settings)
    assert found.activations - without.activations == 2 * 16 * config.hidden_size * 4
    assert found.logits - without.logits == 3 * 512 * 4
