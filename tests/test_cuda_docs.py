"""docs/cuda.md against the sources that it speaks of."""

from __future__ import annotations

import re

import pytest

from npuserve.npu.backends.base import Fault
from npuserve.npu.backends.cuda import LEAST_CAPABILITY, CudaBackend
from npuserve.npu.backends.cuda_graphs import MOST_TOKENS, token_buckets
from npuserve.service.config import ServerConfig
from tests.test_ascend_docs import ROOT, rows, sources

PAGE = (ROOT / "docs" / "cuda.md").read_text()


@pytest.mark.parametrize(
    "said", [part for row in list(rows("When it does not start", PAGE))[1:] for part in row[0].split("; ")])
def test_each_sentence_is_said(said: str) -> None:
    pieces = [piece for piece in re.split(r"\*\w+\*", said) if len(piece) > 3]
    found = sources()
    assert pieces
    assert not [piece for piece in pieces if piece.strip(" ()") not in found]


def test_settings_are_settings() -> None:
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in list(rows("Sizes", PAGE))[1:]))
    assert len(named) > 5
    assert set(named) <= set(ServerConfig.__struct_fields__)


def test_faults_are_all_there() -> None:
    assert {row[0].strip("`") for row in rows("When the GPU fails", PAGE)} >= {fault.value for fault in Fault}


def test_figures_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or later" in text
    small = [size for size in token_buckets(MOST_TOKENS) if size < 64]
    assert f"in buckets of {', '.join(map(str, small))} and every 64 tokens up to {MOST_TOKENS};" in text
    assert token_buckets(MOST_TOKENS)[len(small) :] == (*range(64, MOST_TOKENS + 1, 64),)
    assert f"| `block_size` | {CudaBackend.block_size}; any multiple of {CudaBackend.block_multiple} |" in text
    assert f"whole tiles of {CudaBackend.vocabulary_tile} rows" in text
