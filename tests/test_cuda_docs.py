"""Names and numbers in docs/cuda.md equal the code's."""

from __future__ import annotations

import re

from npuserve.npu.backends.cuda.backend import MIN_CAPABILITY, CudaBackend
from npuserve.npu.backends.cuda.graphs import MAX_TOKENS, token_buckets
from npuserve.npu.backends.faults import Fault
from npuserve.service.config import ServerConfig
from tests.test_ascend_docs import ROOT, names, numbers, row, rows, sources

PAGE = (ROOT / "docs" / "cuda.md").read_text()
MESSAGES = [part for cells in list(rows("When it does not start", PAGE))[1:] for part in cells[0].split("; ")]


def section(name: str) -> str:
    """Return the text of a section."""
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_cuda_docs_errors_name_what_the_code_names() -> None:
    named = set().union(*map(names, MESSAGES))
    assert named <= set(re.findall(r"\w+", sources()))


def test_cuda_docs_settings_exist() -> None:
    named = re.findall(r"`(\w+)`", " ".join(cells[0] for cells in list(rows("Sizes", PAGE))[1:]))
    assert len(named) > 5
    assert set(named) <= set(ServerConfig.__struct_fields__)


def test_cuda_docs_list_all_faults() -> None:
    assert {cells[0].strip("`") for cells in rows("When the GPU fails", PAGE)} >= {fault.value for fault in Fault}


def test_cuda_docs_numbers_are_those_of_the_code() -> None:
    assert ".".join(map(str, MIN_CAPABILITY)) in numbers(section("Install"))
    buckets = token_buckets(MAX_TOKENS)
    small = [size for size in buckets if size < 64]
    assert {*map(str, small), "64", str(MAX_TOKENS)} <= numbers(row("Captured steps", "with chunks", page=PAGE))
    assert buckets[len(small) :] == (*range(64, MAX_TOKENS + 1, 64),)
    assert str(MAX_TOKENS) in numbers(row("Sizes", "max_num_batched_tokens", page=PAGE))
    assert numbers(row("Sizes", "block_size", page=PAGE)) == {
        str(CudaBackend.capabilities.block_size), str(CudaBackend.capabilities.block_multiple)}
    assert str(CudaBackend.capabilities.vocabulary_tile) in numbers(section("Sizes"))
