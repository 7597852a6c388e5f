"""Workloads of `npuserve bench serve`: arrival times and lengths from a trace or a seed, and prompts as token ids."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

HASH_TOKENS = 512
"""Prompt tokens that one hash of a Mooncake trace represents (Mooncake, FAST'25, description of its traces)."""
MAX_LENGTH = 10**9
"""Maximum tokens of a prompt or an answer in a trace. They are cut to the model's context later."""
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?")


class TraceError(Exception):
    """The trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """Request to send at a given time.

    arrival: seconds after the start.
    prompt_tokens, output_tokens: lengths, at least 1.
    hashes: the prompt's leading blocks of `hash_tokens` tokens each. Requests with equal leading hashes share that
        prefix.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...] = ()
    hash_tokens: int = HASH_TOKENS


def poisson(count: int, rate: float, prompt_tokens: int, output_tokens: int, seed: int) -> list[TimedRequest]:
    """Return requests of a Poisson process with `rate` per second, the first at 0; all at 0 for an infinite rate."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [TimedRequest(seconds, prompt_tokens, output_tokens) for seconds in (np.cumsum(gaps) - gaps[0]).tolist()]


def read_trace(path: Path, count: int, time_scale: float = 1.0, length_scale: float = 1.0) -> list[TimedRequest]:
    """Return the first `count` requests of a trace (0: all), the first at 0 seconds. Raise TraceError.

    The first character distinguishes two formats: the Azure LLM inference trace (CSV: TIMESTAMP, ContextTokens,
    GeneratedTokens) and Mooncake's (JSON lines: timestamp in ms, input_length, output_length, hash_ids).

    time_scale: factor of arrival times.
    length_scale: factor of the lengths of prompts, answers and shared blocks.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.read(1)
            file.seek(0)
            rows = _mooncake(file, path) if first == "{" else _azure(file, path)
            requests = list(islice(rows, count or None))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not UTF-8 text") from None
    except csv.Error as error:
        raise TraceError(f"{path}: {error}") from None
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    requests.sort(key=lambda request: request.arrival)

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * length_scale))

    return [
        TimedRequest(
            (request.arrival - requests[0].arrival) * time_scale,
            scaled(request.prompt_tokens), scaled(request.output_tokens),
            request.hashes, scaled(HASH_TOKENS))
        for request in requests
    ]


def _azure(file: TextIO, path: Path) -> Iterator[TimedRequest]:
    rows = csv.DictReader(file)
    for row in rows:
        where = f"{path}:{rows.line_num}"
        stamp = TIMESTAMP.match(row.get("TIMESTAMP") or "")
        if stamp is None:
            raise TraceError(f"{where}: TIMESTAMP: not like 2023-11-16 18:15:46.68: {row.get('TIMESTAMP')!r}")
        try:
            seconds = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}+00:00").timestamp() + float(stamp[3] or 0)
        except ValueError as error:
            raise TraceError(f"{where}: TIMESTAMP: {error}") from None
        yield TimedRequest(seconds, _tokens(row, "ContextTokens", where), _tokens(row, "GeneratedTokens", where))


def _mooncake(file: TextIO, path: Path) -> Iterator[TimedRequest]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            seconds = float(row["timestamp"]) / 1000
            hashes = tuple(int(h) for h in row.get("hash_ids", ()))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TraceError(f"{where}: timestamp or hash_ids: {error}") from None
        if not math.isfinite(seconds):
            raise TraceError(f"{where}: timestamp: must be finite")
        if any(h < 0 for h in hashes):
            raise TraceError(f"{where}: hash_ids: below 0")
        yield TimedRequest(seconds, _tokens(row, "input_length", where), _tokens(row, "output_length", where), hashes)


def _tokens(row: dict[str, object], field: str, where: str) -> int:
    try:
        value = int(str(row[field]))
    except (KeyError, ValueError):
        raise TraceError(f"{where}: {field}: not a whole number: {row.get(field)!r}") from None
    if not 0 <= value <= MAX_LENGTH:
        raise TraceError(f"{where}: {field}: must be from 0 to {MAX_LENGTH}: {str(value)[:20]}")
    return max(1, value)


def cut_to_context(
    requests: Sequence[TimedRequest], max_prompt: int, max_output: int, context: int
) -> tuple[list[TimedRequest], int]:
    """Cut requests to the limits and to the model's context, which holds prompt and answer.

    The prompt is cut before the answer, to at least one token. Return the requests, and how many were cut.

    max_prompt, max_output: limits in tokens; 0 for no limit.
    context: the model's context in tokens.
    """
    fits = []
    for request in requests:
        output = min(request.output_tokens, max_output or context, context - 1)
        prompt = min(request.prompt_tokens, max_prompt or context, context - output)
        fits.append(replace(request, prompt_tokens=prompt, output_tokens=output))
    return fits, sum(a != b for a, b in zip(requests, fits, strict=True))


class Prompts:
    """Random prompts: a function of the seed, and of the request's number or its hashes.

    Special ids are contiguous at one end of a vocabulary. Ids from the end-of-text ids to that end are not drawn.
    """

    def __init__(self, vocabulary_size: int, eos_token_ids: Sequence[int], seed: int):
        self._low = max((i + 1 for i in eos_token_ids if i < vocabulary_size // 2), default=0)
        self._high = min((i for i in eos_token_ids if i >= vocabulary_size // 2), default=vocabulary_size)
        if self._low >= self._high:
            self._low = 0
            self._high = vocabulary_size
        self._seed = seed

    def _draw(self, count: int, *stream: int) -> list[int]:
        # One random number per id, so that a shorter draw is a prefix of a longer one.
        drawn = np.random.default_rng([self._seed, *stream]).random(count)
        return (self._low + (drawn * (self._high - self._low)).astype(np.int64)).tolist()  # type: ignore[no-any-return]

    def token_ids(self, number: int, request: TimedRequest) -> list[int]:
        """Return the prompt of request `number`: exactly request.prompt_tokens ids."""
        if not request.hashes:
            return self._draw(request.prompt_tokens, 0, number)
        ids: list[int] = []
        for index, block in enumerate(request.hashes, 1):
            left = request.prompt_tokens - len(ids)
            ids += self._draw(left if index == len(request.hashes) else min(left, request.hash_tokens), 1, block)
        return ids
