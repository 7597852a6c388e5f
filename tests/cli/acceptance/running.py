"""Runs `npuserve check --accept --json` on the CPU and reads its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any
from unittest import mock

import pytest

from npuserve.cli import main as cli
from npuserve.cli.acceptance import kernels, latency, sampling, variants
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.kernels import linear, native
from npuserve.kernels.case_numbers import FLOATS
from npuserve.kernels.registry import KERNELS

Capture = pytest.CaptureFixture[str]

built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def accepted(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["check", "--accept", "--device", "cpu", "--threads", "1", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["acceptance"]


def part_of(report: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {x["name"]: x for x in report["findings"] if x["part"] == part}


@contextmanager
def few_tokens() -> Iterator[None]:
    """Shorten answers, and leave out two prompts."""
    with (
        mock.patch.multiple(accept_tokens, TEXTS=accept_tokens.TEXTS[:5], ANSWER=12, STEPS_APART=1),
        mock.patch.object(variants, "WIDE_ANSWER", 6),
    ):
        yield


def few_wide_tokens() -> AbstractContextManager[object]:
    """Reduce the prompts and tokens of models with 151,936 ids."""
    return mock.patch.multiple(variants, WIDE_PROMPTS=slice(1, 3), WIDE_ANSWER=6)


def narrow_lm_heads() -> AbstractContextManager[object]:
    """Replace the benchmark cases of LM heads by one of 64 columns for each dtype, which still has 151,936 ids."""
    cases = [linear._argmax_case(8, 64, 151936, 0, benchmark=True, numbers=numbers)
             for numbers in (FLOATS, linear.INT8_MADE)]
    kernel = KERNELS["linear_argmax"]
    return mock.patch.object(kernel, "cases", [case for case in kernel.cases if not case.benchmark] + cases)


@contextmanager
def few_checks() -> Iterator[None]:
    """Leave every fourth test case of a kernel, one size, two parameters of sampling, one variant, one sampler to time,
    and short answers."""
    supported = kernels.supported_cases

    def few_cases(kernel: Any, backend: Any, *, benchmark: bool) -> Iterator[Any]:
        return islice(supported(kernel, backend, benchmark=benchmark), 0, None, 1 if benchmark else 4)

    with (
        few_tokens(), mock.patch.object(kernels, "supported_cases", few_cases),
        mock.patch.object(kernels, "SIZES", kernels.SIZES[3:4]),
        mock.patch.multiple(sampling, CAPTURED={"all of them": sampling.CAPTURED["all of them"]},
                            OUTSIDE={"logprobs": sampling.OUTSIDE["logprobs"]}),
        mock.patch.object(variants, "VARIANTS", variants.VARIANTS[-1:]),
        mock.patch.object(latency, "SAMPLERS", dict([*latency.SAMPLERS.items()][:1])),
    ):
        yield
