"""Fixtures of the acceptance check: small sizes, and a small random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npuserve.cli.acceptance import kernels, latency, variants
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.latency import LatencyCheck
from npuserve.kernels import native
from npuserve.kernels.bench import measure
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend


@pytest.fixture
def threads() -> Iterator[None]:
    """Use one thread, and restore the numbers of threads at the end."""
    of_kernels = native.library().threads if native.available() else 0
    of_torch = torch.get_num_threads()
    CpuBackend(settings=DeviceSettings(threads=1))
    yield
    torch.set_num_threads(of_torch)
    if native.available():
        native.library().set_threads(of_kernels)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    """Shrink all sizes and measurements. Restore the numbers of threads at the end."""
    from npuserve.kernels.bench import ceilings

    for module, name, value in (
        (latency, "READ_BYTES", 8 << 20), (ceilings, "_PASS_SECONDS", 1e-4), (measure, "COLD_BYTES", 1 << 16),
        (measure, "_PASS_SECONDS", 1e-4), (latency, "BATCHES", (1, 9)), (latency, "STEPS", 2),
        (latency, "VOCABULARY", 512),
        (accept_tokens, "ANSWER", 20), (accept_tokens, "BUDGET", 32),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def no_large_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatencyCheck, "kernels", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "check_sizes", lambda *_, **__: iter(()))
    monkeypatch.setattr(variants, "check_variants", lambda *_, **__: iter(()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Not at the top: transformers cannot be imported beside torch_npu without CANN.
    from tests.support.models import random_model, saved

    return saved(random_model("qwen3", max_position_embeddings=256), tmp_path)
