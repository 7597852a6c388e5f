"""Log-probabilities, ranks and the most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.registry import Case, kernel
from npuserve.kernels.sample import largest


def _case(rows: int, vocabulary: int, padding: int, n: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, int, Tensor, int]:
        logits = torch.randn(rows, vocabulary + padding, generator=generator).mul(3).round(decimals=1)
        logits[:, vocabulary:] = 100.0
        return logits.to(dtype), vocabulary, torch.randint(vocabulary, (rows,), generator=generator), n

    return Case(f"{rows}x{vocabulary}+{padding} top {n}", make, benchmark)


@kernel("logprobs", cases=[_case(1, 7, 0, 7), _case(3, 33, 31, 0), _case(5, 101, 27, 5), _case(8, 151936, 0, 5, True)])
def logprobs(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logprob, rank, top_ids, top_logprobs) over the first `vocabulary` ids of logits [R, Vp].

    ids: [R] int64.
    n: number of most likely tokens, 0 to `vocabulary`.

    logprob: [R] float32, the natural logarithm of the probability of `ids`.
    rank: [R] int64, 1 + the number of strictly larger logits.
    top_ids, top_logprobs: [R, n] int64 and float32, the most likely first.

    Equal logits are in ascending order of ids. NaN counts as minus infinity.
    """
    real = logits[:, :vocabulary]
    real = real if real.dtype == torch.float64 else real.float()
    real = real.masked_fill(real.isnan(), -torch.inf)
    logarithms = real.log_softmax(dim=-1)
    chosen = ids.unsqueeze(1)
    rank = (real > real.gather(1, chosen)).sum(dim=-1) + 1
    top_ids = torch.stack([largest(row, n) for row in real]) if len(real) else chosen.new_empty(0, n)
    return logarithms.gather(1, chosen).squeeze(1), rank, top_ids, logarithms.gather(1, top_ids)


@native.implementation(logprobs)
def _(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum in float64; weights below 2**-126 of the largest count as 0."""
    rows = len(logits)
    sums = native.empty(rows, -(-vocabulary // native.CONSTANTS["LOGPROBS_PART"]), 3, dtype=torch.float64)
    largest_of_blocks = native.empty(rows, -(-vocabulary // native.CONSTANTS["LOGPROBS_BLOCK"]), dtype=torch.float32)
    logprob = native.empty(rows, dtype=torch.float32)
    rank = native.empty(rows, dtype=torch.int64)
    top_ids = native.empty(rows, n, dtype=torch.int64)
    top_logprobs = native.empty(rows, n, dtype=torch.float32)
    parts, sizes = [logits, ids, sums, largest_of_blocks], [*logits.shape, vocabulary, n]
    if rows:
        native.call(
            "logprobs",
            ("logprobs", logits.dtype, parts, sizes),
            ("logprobs_merge", logits.dtype, [*parts, logprob, rank, top_ids, top_logprobs], sizes))
    return logprob, rank, top_ids, top_logprobs


@ascend.implementation(logprobs)
def _by_sorting(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    real = logits[:, :vocabulary].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    logarithms = real.log_softmax(dim=-1)
    chosen = ids.unsqueeze(1)
    rank = (real > real.gather(1, chosen)).sum(dim=-1) + 1
    top_ids = real.sort(dim=-1, descending=True, stable=True).indices[:, :n] if n else chosen[:, :0]
    return logarithms.gather(1, chosen).squeeze(1), rank, top_ids, logarithms.gather(1, top_ids)


@triton.implementation(logprobs)
def _(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from npuserve.kernels.triton import launch_vocabulary

    report = launch_vocabulary.logprobs if n <= launch_vocabulary.MAX_TOP_IDS else _by_sorting
    return report(logits, vocabulary, ids, n)
