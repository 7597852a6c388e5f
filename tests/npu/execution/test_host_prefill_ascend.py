"""Prompts computed on the host for an emulated NPU that decodes: tokens equal the tokens of one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from npuserve.npu.step import Step
from tests.npu.backends import small
from tests.npu.emulator.child import needs_npu, run
from tests.npu.execution.test_host_prefill import Talks, check_mirror, constrained, ids, load


def on_the_npu(folder: Path, head_dim: int) -> None:
    small.saved(folder, head_dim=head_dim)
    settings = {"block_size": 128, "decode_buckets": (1, 2, 4), "kv_cache_memory": 24 << 20}
    cpu = load(folder, backend="cpu", **settings)
    npu = load(folder, backend="npu", **settings)
    hosted = load(folder, backend="npu", prefill_device="cpu", **settings)
    for asks in (partial(small.asks, 6), partial(small.asks, 6, temperature=0.9), constrained):
        answers = []
        for runner in (cpu, npu, hosted):
            made, results = small.answers(runner, asks(8))
            answers.append(made)
            assert any(result.captured_decodes + result.decoder_decodes for result in results)
            runner.launch(Step([], ended=list(range(6))))
        assert answers[0] == answers[1] == answers[2]
    turns = []
    for runner in (cpu, npu, hosted):
        talks, prompts, answers = Talks(runner, blocks=7, depth=2, budget=40), [ids(n, n) for n in (100, 250)], []
        for turn in range(2):
            answers.append(talks.turn(prompts, 120))
            prompts = [p + a + ids(5, turn) for p, a in zip(prompts, answers[-1], strict=True)][:1]
        assert talks.scheduler.memory.prefix_hits
        turns.append((answers, talks.scheduler.preemptions))
        runner.launch(Step([], ended=talks.scheduler._ended))
    assert turns[0] == turns[1] == turns[2]
    assert check_mirror(hosted) > 300


@needs_npu
@pytest.mark.parametrize(("order", "seed"), [
    ("shuffled", 1), *(pytest.param(order, 0, marks=pytest.mark.full) for order in ("lazy", "eager"))])
def test_host_prefill_emulated_npu_continues_from_chunks(tmp_path: Path, order: str, seed: int) -> None:
    """The order in which the device runs its streams and the contents of new memory do not matter; heads are padded."""
    run(on_the_npu, {"folder": tmp_path, "head_dim": 32},
        {"relax": ("fp32",), "order": order, "seed": seed, "poison": True})
