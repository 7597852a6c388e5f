"""A hybrid with a head for multi-token prediction, served by an emulated NPU: tokens, drafts and samples by gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, request, serving, streamed
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.mtp import add_head
from tests.npu.backends.small import ids_of
from tests.npu.emulator.child import needs_npu

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), needs_npu]  # ascend/test_mtp.py has steps

LIMITS = ("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "64", "--max-num-seqs", "4",
          "--kv-cache-memory", "64MiB")
PROMPTS = [ids_of(5 + 9 * seed, seed) for seed in range(4)]
ANSWER = 24
SAMPLES = 3


def answers(server: Server) -> list[list[int]]:
    """Return the tokens of all prompts, sent concurrently."""
    asks = [request(prompt, ANSWER, ignore_eos=True) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asks)) as pool:
        return [ids for _, ids, _ in pool.map(lambda ask: streamed(server.stub, ask), asks)]


def samples(server: Server) -> list[list[int]]:
    """Return the tokens of the samples of one call, each of which continues a copy of the prompt's state.

    They are greedy: results of the delta rule's operators are in bfloat16 even here, which may change what is drawn.
    """
    ask = request(ids_of(140, 7), ANSWER, n=SAMPLES, ignore_eos=True)
    return [list(sample.token_ids) for sample in server.stub.Generate(ask, timeout=100).samples]


def test_answers_and_samples_of_a_hybrid_with_drafts_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Rows of up to 4 tokens are verified, and drafts made, in captured steps.

    Two servers of the CPU would show the same: its answers do not depend on drafts.
    """
    folder = str(add_head(saved_hybrid(tmp_path, layers=2, full=(1,))))
    with serving(folder, "--device", "cpu", "--block-size", "128", *LIMITS) as cpu:
        expected = answers(cpu), samples(cpu)
    with serving(folder, "--device", "npu", "--emulate", "--emulate-relax", "fp32", "--kernel-sampling", "0",
                 "--decode-buckets", "1,2,4", "--speculate", "mtp", *LIMITS) as npu:
        found = answers(npu), samples(npu)
        drafted, accepted = (npu.metric(f"npuserve_{name}_tokens_total", kind="mtp")
                             for name in ("draft", "accepted_draft"))
        captured, eager = (npu.metric("npuserve_step_seconds_count", mode=mode) for mode in ("captured", "eager"))
        assert npu.metric("npuserve_state_slots", state="used") == 0
        assert npu.stop() == 0
    assert found == expected
    assert [len(ids) for ids in found[1]] == [ANSWER] * SAMPLES
    assert 0.1 * drafted < accepted < drafted
    assert captured > 0 == eager
