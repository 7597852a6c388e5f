from __future__ import annotations

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.ipc.messages import Finish, Request, Timing
from npuserve.service.scheduling.sequence import Account, Sequence
from npuserve.service.structured_output.constraint import Constraint
from tests.service.scheduling.reference import VOCABULARY, matcher_of


def make(**fields: object) -> Sequence:
    fields = {"request_id": "r", "prompt_ids": [1, 2, 3], "max_tokens": 4, "arrival": 10.0, **fields}
    return Sequence(5, (b"front", 7), Request(**fields), 10.0, Account(""))  # type: ignore[arg-type]


def test_sequence_begins_with_prompt_and_earlier_output() -> None:
    sequence = make(output_ids=[8, 9])
    assert sequence.token_ids == [1, 2, 3, 8, 9]
    assert (sequence.num_prompt_tokens, sequence.num_generated_tokens, sequence.num_uncomputed_tokens) == (3, 2, 5)
    assert sequence.request.prompt_ids == [1, 2, 3]
    sequence.token_ids.append(4)
    assert sequence.request.output_ids == [8, 9]


def test_age_key_is_age_and_queue_key_adds_priority() -> None:
    assert make().age_key == make().queue_key == make(priority=-3).age_key == (10.0, 5)
    assert make(priority=-3, arrival=35.0).queue_key < make(arrival=10.0).queue_key
    assert make(priority=-3, arrival=45.0).queue_key > make(arrival=10.0).queue_key


def test_matcher_of_an_ended_request_computes_nothing() -> None:
    sequence = make(constraint=Constraint("regex", "3"))
    sequence.matcher = matcher_of(sequence.request)
    assert sequence.matcher
    sequence.end()
    sequence.matcher.prepare(VOCABULARY)
    assert not sequence.matcher.is_prepared


def test_finish_of_a_request_that_never_ran() -> None:
    assert make().finish("aborted") == Finish("aborted", 3, 0, 0, Timing(0.0, [], 0.0, 0.0, 0.0, 10.0))


def test_cached_tokens_are_of_the_first_admission() -> None:
    sequence = make()
    sequence.admit(2, 11.0)
    sequence.preempt()
    sequence.admit(0, 12.0)
    assert sequence.finish("length").cached_tokens == 2


def test_cached_tokens_are_of_the_prompt() -> None:
    sequence = make(output_ids=[8, 9, 7])
    sequence.admit(5, 11.0)
    assert sequence.num_computed_tokens == 5
    assert sequence.cached_tokens == 3


def test_sequence_is_prefilling_until_the_tokens_known_at_its_admission_are_computed() -> None:
    sequence = make()
    sequence.admit(0, 11.0)
    for computed, is_prefilling in ((2, True), (3, False)):
        sequence.num_computed_tokens = computed
        assert sequence.is_prefilling is is_prefilling


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([9], "eos"), ([8], "stop_token"), ([7], None), ([7, 7, 7, 7], "length"), ([7, 7, 7, 9], "eos"),
        ([7, 8], "stop_token"),
    ],
)
def test_finish_reason(tokens: list[int], reason: str | None) -> None:
    sequence = make(eos_token_ids=frozenset([9]), stop_token_ids=frozenset([8, 9]))
    sequence.token_ids += tokens
    assert sequence.finish_reason() == reason


def test_finish_reason_before_min_tokens_is_none() -> None:
    sequence = make(eos_token_ids=frozenset([9]), stop_token_ids=frozenset([8]), sampling=SamplingParams(min_tokens=3))
    reasons = []
    for token in (9, 8, 9):
        sequence.token_ids.append(token)
        reasons.append(sequence.finish_reason())
    assert reasons == [None, None, "eos"]


def test_finish_of_a_cut_answer() -> None:
    sequence = make()
    sequence.token_ids += [4, 5, 6]
    assert sequence.finish("stop_string", 2).generated_tokens == 2
    assert sequence.finish("aborted").generated_tokens == 3


def test_uses_prefix_cache_unless_bypassed_or_reported() -> None:
    assert make().uses_prefix_cache
    assert not make(bypass_prefix_cache=True).uses_prefix_cache
    assert not make(sampling=SamplingParams(prompt_logprobs=0)).uses_prefix_cache


def test_can_sample_at_most_one_token_beyond_the_host() -> None:
    sequence = make(max_tokens=3)
    sequence.admit(0, 11.0)
    sequence.num_computed_tokens = 3
    sequence.num_pending_tokens = 1
    assert (sequence.num_tokens, sequence.num_generated_tokens, sequence.num_uncomputed_tokens) == (4, 0, 1)
    assert sequence.can_sample
    sequence.num_pending_tokens = 2
    assert not sequence.can_sample
    sequence.token_ids.append(7)
    sequence.num_pending_tokens = 1
    assert sequence.can_sample
    sequence.token_ids.append(8)
    assert not sequence.can_sample  # the third is being sampled
