"""Repetition, presence and frequency penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel


def _case(rows: int, vocabulary: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
        logits = torch.randn(rows, vocabulary, generator=generator).mul(3).to(dtype)
        in_prompt = torch.rand(rows, vocabulary, generator=generator) < 0.3
        counts = torch.randint(-4, 4, (rows, vocabulary), generator=generator).clamp(min=0).int()
        repetition = torch.rand(rows, generator=generator).add(0.7).to(dtype)
        presence, frequency = torch.randn(2, rows, generator=generator).to(dtype)
        return logits, in_prompt, counts, repetition, presence, frequency

    return Case(f"{rows}x{vocabulary}", make, benchmark)


@kernel(
    "penalize",
    cases=[_case(1, 7), _case(5, 101), *(_case(r, 151936, True) for r in (1, 8, 32))],
    dtypes=(torch.float32,),
)
def penalize(
    logits: Tensor, in_prompt: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Apply penalties to logits [R, Vp] float32 in place.

    in_prompt: [R, Vp] bool.
    output_counts: [R, Vp] int32.
    repetition, presence, frequency: [R] float32.

    The repetition penalty is applied first, to tokens of prompt and output. It divides positive logits and multiplies
    others (Keskar et al. 2019, arXiv:1909.05858, in Hugging Face's signed form). Then frequency times the count, and
    presence once, are subtracted from the logits of output tokens. Both are defined by the OpenAI API and applied as in
    vLLM.
    """
    penalty = torch.where(in_prompt | (output_counts > 0), repetition.unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / penalty, logits * penalty))
    logits.sub_(frequency.unsqueeze(1) * output_counts)
    logits.sub_(presence.unsqueeze(1) * (output_counts > 0))


@native.implementation(penalize)
def _(
    logits: Tensor, in_prompt: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    native.call(
        "penalize",
        ("penalize", logits.dtype, [logits, in_prompt, output_counts, repetition, presence, frequency],
         list(logits.shape)))


@triton.implementation(penalize)
def _(
    logits: Tensor, in_prompt: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    from npuserve.kernels.triton import launch_vocabulary

    launch_vocabulary.penalize(logits, in_prompt, output_counts, repetition, presence, frequency)


ascend.implementation(penalize)(penalize.golden)
