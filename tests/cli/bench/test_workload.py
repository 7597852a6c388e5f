"""Workloads of the load generator: arrivals, traces and prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from npuserve.cli.bench.workload import (
    HASH_TOKENS,
    Prompts,
    TimedRequest,
    TraceError,
    cut_to_context,
    poisson,
    read_trace,
)


def test_poisson_has_its_rate_and_depends_on_its_seed():
    requests = poisson(4000, 50.0, 8, 4, seed=1)
    gaps = np.diff([request.arrival for request in requests])
    assert requests[0].arrival == 0
    # Mean and standard deviation of an exponential distribution are equal; tolerance of 4 standard errors.
    assert gaps.mean() == pytest.approx(1 / 50, rel=4 / np.sqrt(4000))
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    assert requests == poisson(4000, 50.0, 8, 4, seed=1)
    assert requests != poisson(4000, 50.0, 8, 4, seed=2)
    assert {request.arrival for request in poisson(5, float("inf"), 8, 4, seed=1)} == {0.0}


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:59.6805900,374,44
2023-11-16 18:16:00.1805900,396,0
2024-11-16 18:16:00.1805900,396,5
"""


def test_read_trace_azure(tmp_path: Path):
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    requests = read_trace(file, 2, time_scale=2.0)
    assert [(a.prompt_tokens, a.output_tokens) for a in requests] == [(374, 44), (396, 1)]
    assert [a.arrival for a in requests] == pytest.approx([0.0, 1.0])
    assert len(read_trace(file, 0)) == 3
    file.write_text(AZURE.replace("\n2023-11-16 18:16", "+00:00\n2023-11-16 18:16").replace("+00:00\n", "\n"))
    assert read_trace(file, 1)[0].prompt_tokens == 374


def test_read_trace_mooncake_has_shared_prefixes(tmp_path: Path):
    rows = [
        {"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 100, "output_length": 6, "hash_ids": [0]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    requests = read_trace(file, 0)
    assert [request.arrival for request in requests] == [0.0, 2.0, 3.0]
    prompts = Prompts(30000, [2], seed=5)
    first, short, second = (prompts.token_ids(i, request) for i, request in enumerate(requests))
    assert [len(ids) for ids in (first, short, second)] == [1200, 100, 1100]
    assert first[: 2 * HASH_TOKENS] == second[: 2 * HASH_TOKENS]
    assert first[2 * HASH_TOKENS : 1100] != second[2 * HASH_TOKENS :]
    assert short == first[:100]
    # Scaling shrinks blocks and lengths alike.
    small = read_trace(file, 0, length_scale=1 / 16)
    first, _, second = (prompts.token_ids(i, request) for i, request in enumerate(small))
    assert (len(first), len(second)) == (75, 69)
    assert first[:64] == second[:64]
    assert first[64:69] != second[64:]
    # A prompt cut to fewer tokens is a prefix of the whole prompt.
    (cut, *_), number = cut_to_context(requests, 700, 0, 10**6)
    assert number == 2
    assert prompts.token_ids(0, cut) == prompts.token_ids(0, requests[0])[:700]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,2\n", ":2: ContextTokens"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", ":2: GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-45 18:15:46,1,2\n", ":2: TIMESTAMP: month must be in"),
        pytest.param('TIMESTAMP,ContextTokens\n"' + "1" * 200_000 + '",1\n', "field larger than", id="long"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', ":1: timestamp: must be finite"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1e999]}\n', ":1: timestamp or hash_ids"),
        pytest.param('{"timestamp": ' + "[" * 100_000, ":1: timestamp or hash_ids", id="nested"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}\n', ":1: input_length: .* from 0 to 10{9}: -1$"),
        pytest.param('{"timestamp": 0, "input_length": 1, "output_length": ' + "9" * 400 + "}\n",
                     r":1: output_length: must be from 0 to 10{9}: 9{20}$", id="large"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp"\n', ":2: timestamp"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-3]}\n', ":1: hash_ids: below 0"),
    ],
)
def test_read_trace_malformed_is_named(tmp_path: Path, content: str, named: str):
    file = tmp_path / "trace"
    file.write_text(content)
    with pytest.raises(TraceError, match=named):
        read_trace(file, 0)
    with pytest.raises(TraceError, match=r"absent: No such file or directory$"):
        read_trace(tmp_path / "absent", 0)


def test_prompts_exclude_special_ids_at_either_end():
    request = TimedRequest(0.0, 5000, 1)
    low = Prompts(100, [2, 1], seed=0).token_ids(0, request)
    assert (min(low), max(low)) == (3, 99)
    high = Prompts(100, [95, 93], seed=0).token_ids(0, request)
    assert (min(high), max(high)) == (0, 92)
    assert high != Prompts(100, [95, 93], seed=0).token_ids(1, request)
    assert high == Prompts(100, [95, 93], seed=0).token_ids(0, request)
    # The distribution is uniform: chi-square of 93 buckets, about five standard deviations.
    counts = np.bincount(high, minlength=93)
    assert ((counts - 5000 / 93) ** 2 / (5000 / 93)).sum() < 93 + 5 * np.sqrt(2 * 93)


def test_fitted_cuts_to_limits_and_context():
    requests = [TimedRequest(0.0, prompt, output) for prompt, output in ((10, 10), (100, 10), (10, 100), (100, 100))]
    cut, number = cut_to_context(requests, 0, 0, 64)
    assert [(a.prompt_tokens, a.output_tokens) for a in cut] == [(10, 10), (54, 10), (1, 63), (1, 63)]
    assert number == 3
    cut, _ = cut_to_context(requests, 20, 30, 64)
    assert [(a.prompt_tokens, a.output_tokens) for a in cut] == [(10, 10), (20, 10), (10, 30), (20, 30)]
