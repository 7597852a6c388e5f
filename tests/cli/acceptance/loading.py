"""Load of a model as the acceptance check does it, for its tests."""

from __future__ import annotations

from pathlib import Path

from npuserve.cli.acceptance import reference
from npuserve.npu.backends.base import Backend


def loaded(folder: Path, backend: Backend, **settings: int) -> reference.Loaded:
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | settings
    return reference.load(folder, backend, "auto", **sizes)
