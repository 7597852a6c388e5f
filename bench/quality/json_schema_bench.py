"""Structured output on JSONSchemaBench: share of schemas compiled, validity of answers, time to compile and per token.

    python bench/quality/json_schema_bench.py FOLDER --tokenizer FOLDER [--seconds 600] [--every 1] [--walks 2]

FOLDER, or the environment variable NPUSERVE_JSON_SCHEMA_BENCH, is the folder `data` of the public repository
guidance-ai/jsonschemabench: folders of JSON files with one schema each. Answers are random walks: each token is drawn
from the mask, more often from short ones that close a value, so that answers end. The package `jsonschema` judges every
answer that the grammar ended, with its checks of formats; none of its code is shared with the grammar library. Numbers
are compared as decimals. Compilation is timed from submit to result, as a request waits for it; masks and steps in
processor time of the thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from npuserve.service.structured_output.compiler import GrammarCompiler
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import MatcherError
from npuserve.service.structured_output.matcher import Matcher
from npuserve.service.structured_output.vocabulary import Vocabulary
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.service.text.tokenizer_loader import load_tokenizer

MAX_TOKENS = 400
CLOSERS = ('"', '"}', '"]', "}", "]", '",', ",", "}}", "]}", '"}}', ":", '":', ' "', "0", "1", "true")


class Walker:
    """Random walks through masks."""

    def __init__(self, vocabulary: Vocabulary, closers: list[int], seed: int):
        self._vocabulary, self._closers = vocabulary, closers
        self._random = random.Random(seed)
        self._bits = np.zeros(-(-vocabulary.size // 32), np.uint32)
        self.mask_seconds: list[float] = []
        self.advance_seconds: list[float] = []

    def walk(self, matcher: Matcher, max_tokens: int = MAX_TOKENS) -> bytes | None:
        """Return the text of an answer; None if it did not end within `max_tokens`."""
        text = b""
        for _ in range(max_tokens):
            began = time.thread_time()
            matcher.fill(self._bits)
            self.mask_seconds.append(time.thread_time() - began)
            token = self._draw()
            began = time.thread_time()
            if not matcher.advance(token):
                raise AssertionError(f"token {token} is allowed by the mask, but not taken after {text!r}")
            self.advance_seconds.append(time.thread_time() - began)
            if token in self._vocabulary.end_ids:
                return text
            text += self._vocabulary.data.tokens[token]
        return None

    def _draw(self) -> int:
        words = self._bits
        ends = [i for i in self._vocabulary.end_ids if words[i // 32] >> np.uint32(i % 32) & 1]
        if ends and self._random.random() < 0.5:
            return ends[0]
        if self._random.random() < 0.6:
            closers = [i for i in self._closers if words[i // 32] >> np.uint32(i % 32) & 1]
            if closers:
                return self._random.choice(closers)
        for _ in range(8):  # most masks are nearly full or nearly empty
            i = self._random.randrange(self._vocabulary.size)
            if words[i // 32] >> np.uint32(i % 32) & 1:
                return i
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return int(allowed[self._random.randrange(len(allowed))])


def closing_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that close a value, as far as each is one token."""
    found = (tokenizer.encode(text, add_special_tokens=False) for text in CLOSERS)
    return [ids[0] for ids in found if len(ids) == 1]


def judge(schema: Any, text: bytes) -> str:
    """Return "" for a valid answer, else why it is not; "unjudged: …" if jsonschema cannot read the schema."""
    value = json.loads(text.decode(), parse_float=Decimal)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    try:
        error = jsonschema.exceptions.best_match(kind(exact, format_checker=kind.FORMAT_CHECKER).iter_errors(value))
    except Exception as failure:  # of a malformed schema
        return f"unjudged: {type(failure).__name__}"
    return "" if error is None else f"{error.message[:200]} (at {list(error.path)}, {error.validator})"


def quantiles(seconds: list[float], unit: float, name: str) -> str:
    values = sorted(seconds) or [0.0]
    points = (values[len(values) // 2], values[int(len(values) * 0.99)], values[-1])
    return " / ".join(f"{point * unit:.3g}" for point in points) + f" {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=os.environ.get("NPUSERVE_JSON_SCHEMA_BENCH"))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=int, default=1, help="take every n-th schema")
    parser.add_argument("--walks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.folder is None:
        parser.error("name the folder of schemas")
    files = sorted(Path(arguments.folder).rglob("*.json"))
    random.Random(arguments.seed).shuffle(files)
    tokenizer = load_tokenizer(arguments.tokenizer)
    if tokenizer is None or tokenizer.eos_id is None:
        parser.error("--tokenizer: must be a folder with a tokenizer and its eos_token")
    began = time.perf_counter()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, arguments.vocabulary, [tokenizer.eos_id])
    print(f"vocabulary: {time.perf_counter() - began:.2f} s")
    run(files[:: arguments.every], vocabulary, tokenizer, arguments)
    return 0


def run(files: list[Path], vocabulary: Vocabulary, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
    walker = Walker(vocabulary, closing_tokens(tokenizer), arguments.seed)
    compiler = GrammarCompiler(vocabulary, max_cache_bytes=0)
    compiler.submit(Constraint("json_object", "")).wait()
    counts, reasons, compile_seconds = Counter[str](), Counter[str](), list[float]()
    end = time.monotonic() + arguments.seconds
    for file in files:
        if time.monotonic() > end:
            break
        text = file.read_text(encoding="utf-8")
        counts["schemas"] += 1
        began = time.perf_counter()
        compilation = compiler.submit(Constraint("json_schema", text))
        compilation.wait()
        compile_seconds.append(time.perf_counter() - began)
        if compilation.error:
            reasons[str(compilation.error).partition(" at /")[0][:80]] += 1
            continue
        counts["compiled"] += 1
        for _ in range(arguments.walks):
            try:
                answer = walker.walk(compilation.matcher())
            except MatcherError as error:
                counts["walks beyond the limits"] += 1
                print(f"{file.parent.name}/{file.name}: {error}")
                continue
            counts["walks"] += 1
            if answer is None:
                continue
            wrong = judge(json.loads(text), answer)
            if wrong.startswith("unjudged"):
                counts["unjudged"] += 1
                continue
            counts["ended"] += 1
            counts["valid"] += not wrong
            if wrong:
                print(f"INVALID {file.parent.name}/{file.name}: {wrong}\n  {answer[:300]!r}", flush=True)
    compiler.close()
    print(dict(counts))
    print(f"compiled: {counts['compiled'] / max(1, counts['schemas']):.1%}; "
          f"valid: {counts['valid']} of {counts['ended']} that the grammar ended")
    print(f"compile p50 / p99 / max: {quantiles(compile_seconds, 1e3, 'ms')}")
    print(f"mask p50 / p99 / max: {quantiles(walker.mask_seconds, 1e6, 'µs')}, {len(walker.mask_seconds)} tokens")
    print(f"advance p50 / p99 / max: {quantiles(walker.advance_seconds, 1e6, 'µs')}")
    for reason, count in reasons.most_common(30):
        print(f"  {count:5} {reason}")


if __name__ == "__main__":
    sys.exit(main())
