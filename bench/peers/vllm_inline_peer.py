"""vLLM for CPUs in one process, which is faster for small models and several rows. See vllm_peer.py."""

from __future__ import annotations

import argparse

import harness
import vllm_peer


def prepare(args: argparse.Namespace) -> None:
    # The same OpenMP settings as vLLM's worker has.
    vllm_peer.prepare(
        args, VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(args.threads), KMP_BLOCKTIME="5", KMP_TPAUSE="0",
        KMP_AFFINITY=f"granularity=fine,explicit,proclist=[{vllm_peer.cores(args)}]")


class Inline(vllm_peer.Vllm):
    name = "vLLM in one process"


if __name__ == "__main__":
    harness.main(Inline, prepare)
