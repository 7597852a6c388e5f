"""The hunt for a request that kills its engine, played through: engines that die, and who is blamed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npuserve.service.block_manager import BlockManager
from npuserve.service.messages import Request
from npuserve.service.scheduler import Scheduler
from npuserve.service.suspects import DEATHS, Suspects
from tests.service.scheduler_model import FakeDevice


def request(number: int, deaths: int = 0) -> Request:
    return Request(f"r{number}", [number % 7, number // 7, 3], 4, float(number), deaths=deaths)


def test_nobody_is_suspected_at_first() -> None:
    suspects = Suspects()
    for number in range(5):
        suspects.add(number, request(number, DEATHS - 1))
    assert not suspects
    assert all(suspects.admits(number) for number in range(5))


def test_half_of_those_with_the_most_deaths() -> None:
    suspects = Suspects()
    for number, deaths in enumerate([2, 3, 0, 3, 3, 3, 2]):
        suspects.add(number, request(number, deaths))
    assert [n for n in range(7) if suspects.admits(n)] == [1, 3]
    suspects.clear(1)
    assert [n for n in range(7) if suspects.admits(n)] == [3]
    suspects.clear(3)
    assert [n for n in range(7) if suspects.admits(n)] == [4]
    suspects.clear(4)
    suspects.clear(5)
    assert [n for n in range(7) if suspects.admits(n)] == [0]
    suspects.clear(0)
    suspects.clear(6)
    assert not suspects
    assert suspects.admits(2)


class Hunt:
    """Engines, one after the other, over requests of which `killers` end any step that gives them their token number
    `after`; everybody keeps the tokens made so far."""

    def __init__(self, count: int, killers: set[int], after: int, budget: int, seats: int):
        self.killers, self.after, self.budget, self.seats = killers, after, budget, seats
        self.made: dict[int, list[int]] = {number: [] for number in range(count)}
        self.deaths = dict.fromkeys(range(count), 0)
        self.failed: set[int] = set()
        self.lives = 0

    @property
    def left(self) -> list[int]:
        return [n for n, made in self.made.items() if len(made) < 4 and n not in self.failed]

    def live(self) -> None:
        """One engine, until it dies or there is nothing more to do."""
        self.lives += 1
        scheduler = Scheduler(BlockManager(512, 4), max_num_seqs=self.seats, max_num_batched_tokens=self.budget,
                              max_queue=100, aging_seconds=10)
        device = FakeDevice(512, 4, salts := {})
        numbers = {}
        for n in self.left:
            plain = request(n, self.deaths[n])
            sequence = scheduler.add(Request(
                plain.request_id, plain.prompt_ids, 4, plain.arrival, deaths=plain.deaths,
                output_ids=list(self.made[n])), (b"", n), 0.0)
            salts[sequence.id] = ""
            numbers[sequence.id] = n
        began: set[int] = set()
        alone: set[int] = set()
        for now in range(1, 1000):
            step = scheduler.schedule(float(now))
            if not step.rows:
                return
            began |= {numbers[new.request_id] for new in step.new}
            if step.new and scheduler.num_running == 1:
                alone |= {numbers[new.request_id] for new in step.new}
            rows = [(numbers[row.request_id], row.samples) for row in step.rows]
            if any(n in self.killers and samples and len(self.made[n]) >= self.after for n, samples in rows):
                for n in began:
                    if n in alone and self.deaths[n] >= DEATHS:
                        self.failed.add(n)
                    self.deaths[n] += 1
                return
            for progress in scheduler.apply(step, device.run(step), float(now)):
                n = numbers[progress.sequence.id]
                self.made[n] += progress.token_ids
                if progress.token_ids:
                    self.deaths[n] = 0
        pytest.fail("an engine that never comes to rest")


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), killers=st.integers(0, 2), after=st.integers(0, 3), seed=st.integers(0, 1 << 20),
       budget=st.sampled_from([8, 24, 256]), seats=st.sampled_from([1, 5, 64]))
def test_only_killers_are_failed_and_soon(
    count: int, killers: int, after: int, seed: int, budget: int, seats: int
) -> None:
    guilty = set(random.Random(seed).sample(range(count), min(killers, count)))
    hunt = Hunt(count, guilty, after, budget, seats)
    while hunt.left:
        hunt.live()
        assert hunt.lives < 40
    assert hunt.failed == guilty
    assert all(len(made) == 4 for n, made in hunt.made.items() if n not in guilty)
    assert all(len(hunt.made[n]) == after for n in guilty)
    assert hunt.lives <= 1 + len(guilty) * (DEATHS + 1 + count.bit_length())
