"""`npuserve check MODEL --compare`: a checkpoint's answers here and by transformers, token for token.

The device answers a few prompts greedily, as the engine does: in chunks, and beside each other. Then transformers
computes prompts and answers in float32 on the CPU, without a cache. Its own greedy answer is the same if each token is
its argmax after all tokens before, which one pass over prompt and answer shows. The models are in memory one after the
other.

The rule for float32: all tokens are equal, and the log-probabilities of prompts and answers differ by at most
MAX_LOGPROB_DIFFERENCE. Other dtypes, int8 and float8 layers and a quantized KV cache round numbers; they are judged as
`check --accept` does: by the share of positions with the same argmax, and by the gap between an answered token and
transformers' argmax.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.text.model_path import resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from npuserve.cli.acceptance.tokens import Agreement
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.model.config import ModelConfig

MAX_LOGPROB_DIFFERENCE = 1e-4
"""Maximum difference of a token's log-probability in float32."""

PROMPTS = slice(1, 6)
"""Prompts of `acceptance.tokens` that are compared."""

PROMPT = 48
"""Maximum tokens of a prompt."""
ANSWER = 16
"""Tokens of an answer: few, since the logits of all positions are compared."""

COPIES = 4
"""Logits of a sequence that are in memory at the same time, in float32."""


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Agreement on one prompt.

    prompt, answer: numbers of tokens.
    equal: number of answered tokens that are transformers' argmax.
    logprob_difference: largest difference of a token's log-probability, over prompt and answer.
    """

    prompt: int
    answer: int
    equal: int
    logprob_difference: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    rule: what was required.
    equal_argmax: share of all positions whose argmax is transformers'.
    gap: largest difference between transformers' logits of its argmax and of an answered token.
    logit_difference: largest difference of a logit.
    """

    passed: bool
    dtype: str
    rule: str
    equal_argmax: float
    gap: float
    logit_difference: float
    prompts: list[PromptComparison] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Return a table for people."""
        lines = [f"{'compared':11} {'prompt':>6} {'tokens':>7} {'equal':>6} {'log-probabilities differ by':>28}"]
        lines += [f"{'':11} {index:>6} {each.prompt:>7} {f'{each.equal}/{each.answer}':>6} "
                  f"{each.logprob_difference:>28.1e}" for index, each in enumerate(self.prompts)]
        verdict = "as transformers" if self.passed else "NOT as transformers"
        return "\n".join([*lines, f"{'':11} {verdict} in {self.dtype}: {self.rule}"])


def compare(config: ServerConfig) -> Comparison:
    """Compare the model with transformers.

    Raises ConfigError if transformers is absent, does not load the checkpoint, or if the memory is too small.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("compare: transformers is not installed; install it with: pip install "
                          "'npuserve[transformers]'")
    import torch

    from npuserve.cli.acceptance import tokens as accept_tokens
    from npuserve.npu.backends import select
    from npuserve.npu.backends.base import DeviceSettings
    from npuserve.npu.model.config import ModelConfig, ModelError

    folder = resolve(config.model)
    backend = select(config.device, config.relaxations if config.emulate else None,
                     DeviceSettings(threads=config.threads, capture_mode=config.capture))
    can = backend.capabilities
    facts = ModelConfig.from_folder(
        folder, config.lm_head_dtype, task=config.task, float8=can.float8, int4=can.int4, stacks=can.stacks)
    if facts.pooling:
        raise ConfigError("compare: answers are compared, and the model is an embedding model or a reranker, "
                          "which gives none")
    length = min(facts.context_length, PROMPT + ANSWER)
    prompts = accept_tokens.prompts_of(folder, facts.vocab_size, length - ANSWER)[PROMPTS]
    _check_memory(facts, prompts)
    try:
        served, is_exact, answers, logits = _device_side(folder, backend, config, prompts, length)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    gc.collect()
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    reference = _their_logits(folder, torch.float32, sequences)
    agreement = accept_tokens.agreement(reference, logits, prompts, answers)
    compared = [_of_prompt(*each) for each in zip(reference, logits, prompts, answers, strict=True)]
    if is_exact:
        largest = max(each.logprob_difference for each in compared)
        passed = agreement.likeliest == agreement.tokens and largest <= MAX_LOGPROB_DIFFERENCE
        rule = (f"{agreement.likeliest} of {agreement.tokens} tokens equal (all must be), log-probabilities differ by "
                f"{largest:.1e} (limit {MAX_LOGPROB_DIFFERENCE:.0e})")
    else:
        passed, rule = _judge_rounded(agreement, folder, served, sequences, reference)
    return Comparison(passed, served, rule, agreement.share, agreement.gap, agreement.difference, compared)


def _check_memory(facts: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError if the host's memory does not hold transformers' model in float32 beside the logits."""
    from npuserve.npu.backends.cpu import CpuBackend
    from npuserve.npu.execution.memory_plan import mib

    tokens = [len(prompt) + ANSWER for prompt in prompts]
    kept = 4 * facts.vocab_size * (2 * sum(tokens) + COPIES * max(tokens))
    needed = 4 * facts.num_parameters + kept
    available = CpuBackend().memory.available()
    if needed > available:
        raise ConfigError(
            f"compare: transformers needs {mib(needed)} of host memory (weights in float32 "
            f"{mib(4 * facts.num_parameters)}, logits {mib(kept)}), and {mib(available)} is available; compare on a "
            "machine with more memory")


def _device_side(
    folder: Path, backend: Backend, config: ServerConfig, prompts: Sequence[list[int]], length: int
) -> tuple[str, bool, list[list[int]], list[Tensor]]:
    """Return the served dtype, whether nothing is rounded, the answers, and the logits of each prompt and answer."""
    from npuserve.cli.acceptance import tokens as accept_tokens
    from npuserve.cli.acceptance.model import FORCED_BATCH_TOKENS
    from npuserve.cli.acceptance.reference import forced_logits, load

    loaded = load(
        folder, backend, config.dtype, max_model_len=length, max_num_seqs=len(prompts),
        max_num_batched_tokens=accept_tokens.BUDGET, block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype, kv_cache_memory=config.kv_cache_memory,
        lm_head_dtype=config.lm_head_dtype)
    runner = loaded.runner
    weights = loaded.model.weights
    answers = accept_tokens.answers(runner, prompts, ANSWER, 2).tokens
    cached = runner.cache_dtype if runner.cache_dtype != weights.dtype else None
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    logits = list(forced_logits(loaded.model, backend, sequences, FORCED_BATCH_TOKENS, cache_dtype=cached))
    is_exact = runner.dtype_name == "float32" and not weights.quantized_inputs and not cached
    return runner.dtype_name, is_exact, answers, logits


def _their_logits(folder: Path, dtype: torch.dtype, sequences: Sequence[list[int]]) -> list[Tensor]:
    """Return transformers' logits [tokens, vocabulary] float32 of each sequence."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _rename_ignored(config)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True)
    except Exception as error:  # raised by any part of transformers
        said = " ".join(str(error).split())
        raise ConfigError(
            f"compare: transformers {transformers.__version__} does not load this checkpoint, so that nothing was "
            f"compared ({type(error).__name__}: {said[:200]}); a newer transformers may, or compare the checkpoint "
            "that it was made from") from error
    model.eval()
    with torch.inference_mode(), _recurrence(model):
        return [model(torch.tensor([ids])).logits[0].float() for ids in sequences]


def _rename_ignored(config: Any) -> None:
    """Rename modules that stay unquantized to those of the text model, which transformers compares by name."""
    section = getattr(config, "quantization_config", None)
    if isinstance(section, dict) and (names := section.get("modules_to_not_convert")):
        section["modules_to_not_convert"] = [name.replace("model.language_model.", "model.") for name in names]


@contextmanager
def _recurrence(model: Any) -> Iterator[None]:
    """Let transformers compute linear attention token by token, since its form in chunks rounds more."""
    import sys

    module = sys.modules[type(model).__module__]
    chunked = getattr(module, "torch_chunk_gated_delta_rule", None)
    recurrent = getattr(module, "torch_recurrent_gated_delta_rule", None)
    if chunked is None or recurrent is None:
        yield
        return

    def by_token(*args: Any, chunk_size: int = 0, **settings: Any) -> Any:
        return recurrent(*args, **settings)

    module.torch_chunk_gated_delta_rule = by_token  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.torch_chunk_gated_delta_rule = chunked  # type: ignore[attr-defined]


def _of_prompt(reference: Tensor, logits: Tensor, prompt: list[int], answer: list[int]) -> PromptComparison:
    import torch

    following = torch.tensor((prompt + answer)[1:])[:, None]
    theirs, ours = (each[:-1].log_softmax(-1).gather(1, following) for each in (reference, logits))
    argmax = reference[len(prompt) - 1 : -1].argmax(-1)
    return PromptComparison(len(prompt), len(answer), int((argmax == torch.tensor(answer)).sum()),
                            float((theirs - ours).abs().nan_to_num(nan=float("inf")).max()))


def _judge_rounded(
    agreement: Agreement, folder: Path, dtype: str, sequences: Sequence[list[int]], reference: Sequence[Tensor]
) -> tuple[bool, str]:
    """Return the verdict, and its figures in words, by the rule of `check --accept`."""
    import torch

    from npuserve.cli.acceptance.model import MAX_GAP, judge_rounded

    def share_in_dtype() -> float:
        theirs = _their_logits(folder, getattr(torch, dtype), sequences)
        equal = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(theirs, reference, strict=True))
        return equal / agreement.positions

    verdict = judge_rounded(agreement, share_in_dtype, dtype != "float32")
    rounded = "" if verdict.rounded_share is None else f"; transformers in {dtype}: {verdict.rounded_share:.4f}"
    return verdict.passed, (
        f"{agreement.likeliest} of {agreement.tokens} tokens equal; {agreement.share:.4f} of {agreement.positions} "
        f"positions have the same argmax (least {verdict.min_share:.4f}{rounded}); gap {agreement.gap:.1e} (limit "
        f"{MAX_GAP * agreement.difference:.1e})")
