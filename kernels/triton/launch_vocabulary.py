"""Calls of the kernels in sampling.py, logprobs.py, penalize.py and mask_logits.py: checks of arguments, and division
into parts.

Estimates for an H200 and 151,936 ids in bf16:
- A pass reads 304 KB a row, 19 MB for 64 rows: 4.5 us. Some 12 instructions a number take as much time again. Data
  read once stays in L2 for up to some 128 rows.
- The ramp and tail of a kernel are 2 us.
- `greedy`: 4 us for one row, 10 us for 64.
- `sample`: 12 and 30 us without top_k and top_p, 35 and 95 us with them.
- `cut` among many nearly equal ids: the row's program passes over all of them once for each binary digit of their
  number. If all ids of the vocabulary are nearly equal, it takes 0.3 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels.triton.common import INT32, check, matrix, power, within
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.logprobs import report_kernel, report_parts_kernel
from npuserve.kernels.triton.mask_logits import mask_logits_kernel
from npuserve.kernels.triton.penalize import penalize_kernel
from npuserve.kernels.triton.sampling import (
    PROBES,
    cut_kernel,
    draw_kernel,
    gather_kernel,
    likeliest_kernel,
    peaks_kernel,
    probe_kernel,
    weigh_kernel,
)

PART = 4096
"""Ids of a row per program: 38 programs for a row of 151,936, with 32 numbers per thread of 128."""

MAX_VOCABULARY = 2**22
"""Maximum ids, so that the sum of a row's masses fits an int64."""

MAX_TOP_IDS = 64
"""Maximum number of most likely ids for `logprobs`."""

_CUT_BLOCK = 4096  # undecided ids that `cut` processes at a time
_MAX_MASS_BITS = 48  # of the peak's mass, so that ids beyond `END` have no mass


def greedy(logits: Tensor, vocabulary: int) -> Tensor:
    """Launch the kernel `greedy`. Raises ValueError."""
    parts = _parts(logits, vocabulary)
    rows = len(logits)
    ids = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    if rows:
        keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
        pdl = dependent(logits)
        peaks_kernel[(rows, parts)](
            logits=logits, keys=keys, gathered=None, vocabulary=vocabulary, stride=logits.stride(0),
            parts=parts, PART=PART, **pdl)
        likeliest_kernel[(rows,)](keys=keys, ids=ids, parts=parts, PARTS=power(parts), num_warps=1, **pdl)
    return ids


def sample(
    logits: Tensor, vocabulary: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    cut: bool = True,
) -> Tensor:
    """Launch the kernel `sample`; rows with a temperature of 0 are greedy.

    Masses are integers, in units of 2**-44 of the peak's mass at 151,936 ids; lighter ids have no mass. With `cut`, the
    call allocates 8 bytes for each logit. Raises ValueError.
    """
    parts = _parts(logits, vocabulary)
    rows, device = len(logits), logits.device
    for name, tensor, dtypes in (
        ("temperature", temperature, (torch.float32,)), ("top_k", top_k, (torch.int64,)),
        ("top_p", top_p, (torch.float32,)), ("min_p", min_p, (torch.float32,)),
        ("uniform", uniform, (torch.float64, torch.float32)),
    ):
        check(name, tensor, (rows,), dtypes, device)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids = empty(rows, 1, dtype=torch.int64)
    if not rows:
        return ids
    keys, masses = empty(rows, parts, dtype=torch.int64), empty(rows, parts, dtype=torch.int64)
    gathered = empty(rows, dtype=torch.int32) if cut else None
    borders = empty(rows, dtype=torch.int64) if cut else None
    pdl = dependent(logits)
    row = {"keys": keys, "temperature": temperature, "parts": parts, "vocabulary": vocabulary, "PARTS": power(parts),
           **pdl}
    part = row | {"logits": logits, "stride": logits.stride(0), "PART": PART, "num_warps": 8}
    one = {"ONE": 2.0 ** min(_MAX_MASS_BITS, 62 - vocabulary.bit_length())}
    peaks_kernel[(rows, parts)](
        logits=logits, keys=keys, gathered=gathered, vocabulary=vocabulary, stride=logits.stride(0), parts=parts,
        PART=PART, **pdl)
    if cut:
        probed = {"top_k": top_k, "top_p": top_p,
                  "distances": empty(2, rows, PROBES.value, dtype=torch.float32),
                  "sums": empty(2, rows, parts, PROBES.value, dtype=torch.float32),
                  "numbers": empty(2, rows, parts, PROBES.value, dtype=torch.int32)}
        found = {"gathered": gathered, "undecided": empty(rows, vocabulary, dtype=torch.int64),
                 "above": empty(2, rows, parts, dtype=torch.int64), "masses": masses}
        for number in range(2):
            probe_kernel[(rows, parts)](**part, **probed, ROUND=number)
        gather_kernel[(rows, parts)](**part, **one, **probed, **found)
        cut_kernel[(rows,)](
            **row, **one, **found, top_k=top_k, top_p=top_p, borders=borders, BLOCK=_CUT_BLOCK, num_warps=16)
    kept = {"min_p": min_p, "borders": borders, "masses": masses, **one}
    weigh_kernel[(rows, parts)](**part, **kept)
    draw_kernel[(rows,)](**part, **kept, uniform=uniform, ids=ids)
    return ids


def mask_logits(logits: Tensor, vocabulary: int, bits: Tensor, mask_of_row: Tensor) -> None:
    """Launch the kernel `mask_logits`. Raises ValueError."""
    parts = _parts(logits, vocabulary)
    rows, words = len(logits), -(-vocabulary // 32)
    within("masks", len(bits), 0, INT32)
    check("bits", bits, (len(bits), words), (torch.int32,), logits.device)
    check("mask_of_row", mask_of_row, (rows,), (torch.int32,), logits.device)
    if rows:
        mask_logits_kernel[(rows, parts)](
            logits=logits, bits=bits, mask_of_row=mask_of_row, vocabulary=vocabulary, words=words,
            stride=logits.stride(0), PART=PART, num_warps=8, **dependent(logits))


def penalize(
    logits: Tensor, in_prompt: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Launch the kernel `penalize`. Raises ValueError."""
    matrix("logits", logits, logits.device)
    rows, width = logits.shape
    within("rows of logits", rows, 0, INT32)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: {logits.dtype} is not float32")
    check("in_prompt", in_prompt, (rows, width), (torch.bool,), logits.device)
    check("output_counts", output_counts, (rows, width), (torch.int32,), logits.device)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check(name, tensor, (rows,), (torch.float32,), logits.device)
    if logits.numel():
        penalize_kernel[(rows, -(-width // PART))](
            logits=logits, in_prompt=in_prompt, output_counts=output_counts, repetition=repetition,
            presence=presence, frequency=frequency, width=width, stride=logits.stride(0), PART=PART, num_warps=8,
            **dependent(logits))


def logprobs(logits: Tensor, vocabulary: int, ids: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel `logprobs` with n up to `MAX_TOP_IDS`. Raises ValueError."""
    parts = _parts(logits, vocabulary)
    rows, device = len(logits), logits.device
    check("ids", ids, (rows,), (torch.int64,), device)
    within("n", n, 0, min(vocabulary, MAX_TOP_IDS))
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(rows, n, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(rows, n, dtype=torch.float32, device=device)
    if rows:
        candidates = torch.empty(rows, parts, n, dtype=torch.int64, device=device)
        peaks, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=device)
        larger = torch.empty(rows, parts, dtype=torch.int32, device=device)
        both = {"logits": logits, "ids": ids, "candidates": candidates, "peaks": peaks, "sums": sums,
                "larger": larger, "vocabulary": vocabulary, "stride": logits.stride(0), "parts": parts, "count": n,
                **dependent(logits)}
        report_parts_kernel[(rows, parts)](**both, PART=PART, num_warps=8)
        report_kernel[(rows,)](
            **both, logprob=logprob, rank=rank, top_ids=top_ids, top_logprobs=top_logprobs, PARTS=power(parts),
            CANDIDATES=power(max(parts * n, 1)), num_warps=4)
    return logprob, rank, top_ids, top_logprobs


def _parts(logits: Tensor, vocabulary: int) -> int:
    """Return the parts of a row. Raises ValueError unless logits are [R, at least vocabulary]."""
    matrix("logits", logits, logits.device)
    within("rows of logits", len(logits), 0, INT32)
    within("vocabulary", vocabulary, 1, min(logits.shape[1], MAX_VOCABULARY))
    return -(-vocabulary // PART)
