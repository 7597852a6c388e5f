"""Steps with constrained rows: their tokens follow the masked distribution, and other rows do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.registry import KERNELS
from npuserve.kernels.uniform import uniform
from npuserve.npu.backends.base import Backend, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import load as load_module
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult
from tests.npu.backends.small import GREEDY, Ask, Mask, answers, bits_of, ids_of, masked, saved, saved_w8a8
from tests.npu.execution.test_dispatch import Bucketed

VOCABULARY = 100
NATIVE = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
BACKENDS = {"native": CpuBackend, "golden": partial(CpuBackend, native=False), "bucketed": Bucketed}
EACH_BACKEND = pytest.mark.parametrize("kind", [
    pytest.param("native", marks=NATIVE), "golden", pytest.param("bucketed", marks=NATIVE)])


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that loads the small model, on a kind of backend."""
    before = torch.get_num_threads()

    def made(kind: str = "native" if native.available() else "golden", folder: Path | None = None,
             **settings: Any) -> Runner:
        make: Callable[..., Backend] = BACKENDS[kind]
        monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: make(settings=settings))
        defaults = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 128, "threads": 1,
                    "kv_cache_memory": 16 << 20, "block_size": 16}
        return load_module.load_runner(folder or saved(tmp_path / "small", vocabulary=VOCABULARY),
                                       **{**defaults, **settings}, progress=lambda done, total: None)

    yield made
    CpuBackend(settings=DeviceSettings(threads=0))
    torch.set_num_threads(before)


SAMPLING = [
    {}, {}, {"temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.1, "logit_bias": {7: 4.0}, "presence_penalty": 0.5}, {"min_tokens": 6, "ending_ids": (3, 7, 50)},
]


def mixed(every: int = 2, **more: Any) -> list[Ask]:
    """Return requests with different sampling, which arrive one after the other. One of `every` is constrained."""
    return [
        Ask(ids_of(3 + 9 * i, i), 7 + i, SamplingParams(seed=i, **({"temperature": 0.0} | sampling | more)), at=i,
            mask=masked(i) if i % every == 0 else None)
        for i, sampling in enumerate(SAMPLING)]


def alone(make: Callable[[], list[Ask]], runner: Runner) -> list[list[int]]:
    """Return the answers of the requests, one after the other in a batch of their own."""
    found = []
    for ask in make():
        found += answers(runner, [replace(ask, at=0)], chunk=64, in_flight=1)[0]
        runner.launch(Step([], ended=[0]))
    return found


def end(runner: Runner, asks: list[Ask]) -> None:
    runner.launch(Step([], ended=list(range(len(asks)))))


@pytest.mark.slow
@EACH_BACKEND
@pytest.mark.parametrize("every", [1, 2])
def test_constrained_tokens_depend_on_request_alone(load: Any, kind: str, every: int) -> None:
    """One or two steps in flight, chunks, and other rows change nothing."""
    runner = load(kind)
    expected = alone(lambda: mixed(every), runner)
    for in_flight in (1, 2):
        for chunk in (5, 64):
            asks = mixed(every)
            got, results = answers(runner, asks, chunk=chunk, in_flight=in_flight)
            assert got == expected
            assert kind == "golden" or any(result.decoder_decodes for result in results)
            end(runner, asks)


@EACH_BACKEND
def test_constrained_rows_leave_other_rows_unchanged(load: Any, kind: str) -> None:
    """Other rows' tokens and reports are bit-identical, and constrained rows' tokens are in their masks."""
    runner = load(kind)
    found = []
    for constrained in (False, True):
        asks = mixed(2, logprobs=3)
        for ask in asks:
            ask.mask = ask.mask if constrained else None
        got, results = answers(runner, asks)
        end(runner, asks)
        found.append((got[1::2], [reports for result in results for key, reports in sorted(result.logprobs.items())
                                  if key % 2]))
        masks = {key: ask.mask for key, ask in enumerate(asks) if ask.mask}
        for key, mask in masks.items():
            for i, token in enumerate(got[key]):
                assert mask(got[key][:i])[token // 32] >> token % 32 & 1
    assert found[0] == found[1]


def reports_of(runner: Runner, sampling: SamplingParams, mask: Mask, count: int = 12) -> tuple[list[int], list[Any]]:
    asks = [Ask(ids_of(20, 9), count, sampling, mask=mask), Ask(ids_of(9, 1), count)]
    got, results = answers(runner, asks)
    end(runner, asks)
    return got[0], [report for result in results for report in result.logprobs.get(0, [])]


def logits_of(report: Any) -> torch.Tensor:
    """Return the logits of a report of all ids, up to a constant."""
    made = torch.empty(VOCABULARY)
    made[report.top_ids] = torch.tensor(report.top_logprobs)
    return made


@EACH_BACKEND
def test_constrained_greedy_token_is_likeliest_of_mask(load: Any, kind: str) -> None:
    """The reports have the distribution without the mask. Without reports, LM head and argmax are one kernel."""
    runner = load(kind)
    got, reports = reports_of(runner, replace_of(GREEDY, logprobs=VOCABULARY), masked(3))
    assert len(reports) == len(got) == 12
    for i, (token, report) in enumerate(zip(got, reports, strict=True)):
        allowed = [j for j in report.top_ids if masked(3)(got[:i])[j // 32] >> j % 32 & 1]
        assert token == allowed[0] == report.token_id
        assert logits_of(report).logsumexp(0).item() == pytest.approx(0, abs=1e-4)
    assert any(report.rank > 1 for report in reports)
    assert reports_of(runner, GREEDY, masked(3))[0] == got


@EACH_BACKEND
def test_constrained_sampled_token_equals_sampling_of_masked_logits(load: Any, kind: str) -> None:
    runner = load(kind)
    sampling = SamplingParams(temperature=1.3, top_k=12, top_p=0.95, seed=11, logprobs=VOCABULARY)
    got, reports = reports_of(runner, sampling, masked(4))
    for i, report in enumerate(reports):
        allowed = torch.tensor([bool(masked(4)(got[:i])[j // 32] >> j % 32 & 1) for j in range(VOCABULARY)])
        logits = logits_of(report).masked_fill(~allowed, -torch.inf).unsqueeze(0)
        expected = KERNELS["sample"](
            logits, VOCABULARY, torch.tensor([1.3]), torch.tensor([12]), torch.tensor([0.95]), torch.tensor([0.0]),
            torch.from_numpy(uniform([11], [20 + i])))
        assert got[i] == expected.item()
    assert reports_of(runner, replace_of(sampling, logprobs=None), masked(4))[0] == got


def replace_of(sampling: SamplingParams, **fields: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | fields)


@pytest.mark.parametrize("sampling", [*SAMPLING[1:], {"logprobs": 1, "prompt_logprobs": 1}], ids=str)
def test_constrained_single_id_is_forced(load: Any, sampling: dict[str, Any]) -> None:
    """Also an id of low probability, and an ending id before min_tokens."""
    runner = load()
    forced = [97, 3, 7, 3, 50, 0, 99, 31, 32, 64]
    asks = [Ask(ids_of(5), len(forced), SamplingParams(**({"temperature": 0.0} | sampling)),
                mask=lambda ids: bits_of([forced[len(ids)]]))]
    assert answers(runner, asks)[0] == [forced]


def first_token(runner: Runner, mask: Any, rows: int = 1, **sampling: Any) -> int:
    """Return the token of the last of `rows` requests, of which it alone is constrained."""
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    prompts = [ids_of(6, row) for row in range(rows)]
    launched = runner.launch(Step(
        [Row(r, p, 0, [r], True, is_constrained=r == rows - 1) for r, p in enumerate(prompts)],
        [NewRequest(r, p, [], params) for r, p in enumerate(prompts)]))
    runner.sample(launched, {} if mask is None else {rows - 1: mask})
    token = runner.collect(launched).token_ids[rows - 1][0]
    runner.launch(Step([], ended=list(range(rows))))
    return token


def test_constrained_min_tokens_and_allowed_ids_restrict_mask(load: Any) -> None:
    """The mask wins where nothing would remain."""
    runner = load()
    for temperature in (0.0, 1.0):
        more = {"temperature": temperature, "min_tokens": 3, "ending_ids": (40, 41)}
        assert first_token(runner, bits_of([40, 41, 70]), **more) == 70
        assert first_token(runner, bits_of([41]), **more) == 41
        assert first_token(runner, bits_of([40, 41, 70]), **more, allowed_token_ids=(41, 70, 99)) == 70
        assert first_token(runner, bits_of([41, 99]), **more, allowed_token_ids=(41,)) == 41
        assert first_token(runner, bits_of([12]), allowed_token_ids=(41, 70), temperature=temperature) == 12
        assert first_token(runner, bits_of([12, 70]), allowed_token_ids=(41, 70), logit_bias={12: 50.0}) == 70
        biased = {**more, "logit_bias": {12: 1.0, 41: 1.0}}  # edits the logits on the device, too
        assert first_token(runner, bits_of([12]), **biased, allowed_token_ids=(41, 70)) == 12
        assert first_token(runner, bits_of([41]), **biased) == 41


def test_constrained_bits_beyond_vocabulary_do_not_count(load: Any) -> None:
    runner = load()
    mask = bits_of([5])
    mask[3] = -16  # ids from 100 on
    assert first_token(runner, mask) == 5
    assert first_token(runner, mask, temperature=5.0) == 5


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 1.5, "seed": 4}, {"frequency_penalty": 1.9, "repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 2.0, "seed": 3}], ids=str)
def test_constrained_token_without_mask_is_discarded(load: Any, sampling: dict[str, Any]) -> None:
    """The position is sampled again, and the discarded token, the likeliest with the mask too, does not count for
    penalties."""
    runner, prompt, found = load(), ids_of(6), []
    mask, params = bits_of(range(VOCABULARY)), SamplingParams(**({"temperature": 0.0} | sampling))
    for number, is_discarded in enumerate((False, True)):
        tokens, new = list(prompt), [NewRequest(number, prompt, [], params)]
        start = 0
        for step in range(9):
            for masks in ([{}] if is_discarded and step % 3 == 0 else []) + [{number: mask}]:
                row = Row(number, tokens[start:], start, [number], True, is_constrained=True)
                launched, new = runner.launch(Step([row], new)), []
                runner.sample(launched, masks)
                token, start = runner.collect(launched).token_ids[number][0], len(tokens) - 1
            tokens.append(token)
            start = len(tokens) - 1
        found.append(tokens)
    runner.launch(Step([], ended=[0, 1]))
    assert found[0] == found[1]


def test_constrained_row_without_mask_is_sampled_freely(load: Any) -> None:
    runner = load()
    for rows in (1, 3):
        free = first_token(runner, np.full(4, -1, np.int32), rows)
        assert first_token(runner, None, rows) == free


def constrained_step(runner: Runner) -> tuple[Any, Callable[..., None]]:
    prompt = ids_of(6)
    runner.launch(Step([], [NewRequest(8, prompt, [], GREEDY), NewRequest(9, prompt, [], GREEDY)]))
    rows = [Row(r, prompt, 0, [r], True, is_constrained=True) for r in (8, 9)]
    launched = runner.launch(Step(rows))
    return launched, lambda **masks: runner.sample(launched, {int(k[1:]): mask for k, mask in masks.items()})


def test_constrained_wrong_masks_are_refused(load: Any) -> None:
    """The step can then still be sampled."""
    runner = load()
    launched, sample = constrained_step(runner)
    good = bits_of([4])
    for wrong, message in (
        (np.zeros(4, np.int32), "request 9: no id from 0 to 99 is allowed"),
        (np.array([0, 0, 0, -16], np.int32), "request 9: no id from 0 to 99 is allowed"),
        (np.ones(3, np.int32), r"request 9: \[3\] int32, where a mask is \[4\] int32"),
        (np.ones(4, np.int64), r"request 9: \[4\] int64, where a mask is \[4\] int32"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(_8=good, _9=wrong)
    assert not runner.ready(launched)
    sample(_8=good, _9=bits_of([5]))
    good[:] = -1  # read only until `sample` returned
    assert runner.collect(launched).token_ids == {8: [4], 9: [5]}


def test_constrained_step_without_sample_is_refused(load: Any) -> None:
    runner = load()
    launched, sample = constrained_step(runner)
    for call in (lambda: runner.launch(Step([])), lambda: runner.collect(launched)):
        with pytest.raises(RuntimeError, match="not called for the step with constrained requests 8, 9"):
            call()
    sample(_8=bits_of([1]), _9=bits_of([2]))
    with pytest.raises(RuntimeError, match="needs no masks"):
        sample(_8=bits_of([1]))
    runner.collect(launched)
    plain = runner.launch(Step([Row(8, [PENDING], 6, [8], True)]))
    with pytest.raises(RuntimeError, match="needs no masks"):
        runner.sample(plain, {8: bits_of([1])})
    assert set(runner.collect(plain).token_ids) == {8}


def test_constrained_row_that_does_not_sample_needs_no_mask(load: Any) -> None:
    runner = load()
    prompt = ids_of(6)
    launched = runner.launch(Step([Row(0, prompt[:3], 0, [0], False, is_constrained=True)],
                                  [NewRequest(0, prompt, [], GREEDY)]))
    assert runner.collect(launched).token_ids == {}


def test_constrained_steps_keep_one_dispatch_of_the_decoder(load: Any) -> None:
    """Decode rows are captured, chunks too; `linear_argmax` follows without logits in memory, also when timed."""
    if not native.available():
        pytest.skip("the native kernels are not built")
    seen: list[tuple[str, str, str, float]] = []
    runner = load(kernel_sampling=1, observe=lambda *call: seen.append(call))
    asks = [Ask(ids_of(12, i), 6, at=i, mask=masked(i) if i else None) for i in range(3)]
    got, results = answers(runner, asks)
    assert all(result.captured and result.timed and result.device_seconds > 0 for result in results)
    names = [name for name, *_ in seen]
    sampling = sum(bool(result.token_ids) for result in results)
    assert names.count("linear_argmax") == names.count("keep_ids") == sampling
    assert names.count("embedding") == len(results)
    assert not {"greedy", "sample", "mask_logits"} & set(names)
    end(runner, asks)
    plain = load()
    asks = [replace(ask, tokens=[], done=0, sampled=0) for ask in asks]
    assert answers(plain, asks)[0] == got


def test_constrained_prompt_logprobs_are_unchanged(load: Any) -> None:
    runner = load()
    found: list[StepResult] = []
    prompt = ids_of(12)
    for mask in (None, masked(0)):
        ask = Ask(prompt, 3, SamplingParams(temperature=0.0, prompt_logprobs=2), mask=mask)
        _, results = answers(runner, [ask], chunk=5)
        end(runner, [ask])
        found.append([report for result in results for report in result.prompt_logprobs.get(0, [])])
    assert found[0] == found[1]
    assert len(found[0]) == len(prompt) - 1


@NATIVE
@pytest.mark.parametrize("settings", [
    {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"w8a8": True, "lm_head_dtype": "int8"},
    {"w8a8": True, "lm_head_dtype": "int8", "dtype": "bfloat16", "kv_cache_dtype": "int8"}], ids=str)
def test_constrained_tokens_by_form_of_weights(load: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    """The tokens are the same with reports of log-probabilities, which need stored logits."""
    settings = dict(settings)
    folder = (saved_w8a8(tmp_path / "int8", vocabulary=VOCABULARY) if settings.pop("w8a8", False) else None)
    runner = load(folder=folder, **settings)
    found = []
    for logprobs in (None, 0):
        asks = [Ask(ids_of(5 + 7 * i, i), 9, replace_of(GREEDY, logprobs=logprobs), at=i, mask=masked(i) if i else None)
                for i in range(4)]
        found.append(answers(runner, asks)[0])
        end(runner, asks)
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 4
