"""Samples of one call in the engine: one name, one abort, one copy of the prompt, in every life of the engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.ipc import messages as m
from tests.service.engine.test_loop import Peer, running, until

PROMPT = list(range(100, 141))  # 10 blocks of 4 tokens, and one token


def submit(peer: Peer, keys: range, name: str = "call", max_tokens: int = 5, **fields: object) -> None:
    """Send the samples of one call, with these keys."""
    arrival = time.monotonic()
    for index, key in enumerate(keys):
        peer.send(m.Submit(key, m.Request(
            name, PROMPT, max_tokens, arrival, SamplingParams(seed=index), index=index, samples=len(keys), **fields)))  # type: ignore[arg-type]


def test_samples_are_answered_with_one_copy_of_the_prompt(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        submit(peer, range(1, 5))
        ends = peer.until_end(1, 2, 3, 4)
        assert [peer.tokens(key) for key in range(1, 5)] == [[141, 142, 143, 144, 145]] * 4
        assert [end.finish.cached_tokens for key, end in sorted(ends.items()) if end.finish] == [0, 40, 40, 40]
        assert engine.engine.registry.find("call") == []


def test_samples_have_one_name(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003) as engine:
        peer = Peer(engine.address)
        submit(peer, range(1, 4), max_tokens=200)
        peer.until_tokens(3, 1)
        peer.submit(10, [1], 3, request_id="call")
        submit(peer, range(11, 14))
        submit(peer, range(14, 16), client="other")
        ends = peer.until_end(*range(10, 16))
        refused = {key: end.error[0] for key, end in ends.items() if end.error}
        assert refused == dict.fromkeys(range(10, 14), "DuplicateRequest")
        assert [len(call) for call in engine.engine.registry.find("call")] == [3]
        for key in (1, 2):
            peer.send(m.Cancel(key))
        peer.submit(16, [1], 3, request_id="call")  # sample 3 is live
        assert peer.until_end(16)[16].error
        peer.send(m.Cancel(3))
        peer.submit(17, [1], 3, request_id="call")
        assert peer.until_end(17)[17].finish
        engine.engine.registry.check_integrity()


@pytest.mark.parametrize("tokens", [0, 2])
def test_abort_ends_all_samples_of_a_call(tmp_path: Path, tokens: int) -> None:
    with running(tmp_path, delay=0.01, budget=8) as engine:
        asker, admin = Peer(engine.address), Peer(engine.address)
        submit(asker, range(1, 4), max_tokens=200)
        if tokens:
            asker.until_tokens(3, tokens)
        else:
            until(lambda: engine.scheduler.num_waiting == 2)  # the first computes the prompt
        admin.send(m.Abort(1, "call"))
        assert admin.reply(1) == 1
        ends = asker.until_end(1, 2, 3)
        for key in (1, 2, 3):
            finish = ends[key].finish
            assert finish
            assert (finish.reason, finish.generated_tokens) == ("aborted", len(asker.tokens(key)))
        admin.send(m.Abort(2, "call"))
        assert admin.reply(2) == 0


def test_abort_of_a_name_of_two_clients_ends_none(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003) as engine:
        peer = Peer(engine.address)
        submit(peer, range(1, 3), max_tokens=200, client="a")
        submit(peer, range(3, 5), max_tokens=200, client="b")
        peer.until_tokens(4, 1)
        peer.send(m.Abort(1, "call"))
        assert peer.reply(1) == 2
        peer.send(m.Abort(2, "call", "b"))
        assert peer.reply(2) == 1
        assert all(end.finish for end in peer.until_end(3, 4).values())
        assert [len(call) for call in engine.engine.registry.find("call")] == [2]
        peer.send(m.Abort(3, "call"))
        peer.until_end(1, 2)


def test_lost_front_end_frees_all_samples(tmp_path: Path) -> None:
    with running(tmp_path, delay=0.003, budget=8) as engine:
        lost = Peer(engine.address)
        submit(lost, range(1, 5), max_tokens=200)
        until(lambda: engine.scheduler.num_waiting == 3)
        lost.socket.close()
        until(lambda: not engine.scheduler._sequences)
        assert engine.blocks.counts.used == 0


def test_restored_samples_continue(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        peer = Peer(engine.address)
        live = []
        for index, made in ((1, 3), (2, 0), (3, 1)):  # sample 0 has ended
            record = m.Record(m.Request(
                "call", PROMPT, 9, 5.0, SamplingParams(seed=index), index=index, samples=4))
            record.add(m.Output(index, [141 + i for i in range(made)]))
            live.append((index, record))
        peer.send(m.Restore(live, []))
        ends = peer.until_end(1, 2, 3)
        for (index, record), made in zip(live, (3, 0, 1), strict=True):
            assert peer.tokens(index) == [141 + i for i in range(made, 9)]
            finish = ends[index].finish
            assert finish
            assert (finish.reason, finish.generated_tokens) == ("length", 9)
            assert record.request.index == index
        assert engine.scheduler.memory.prefix_hits == 80
