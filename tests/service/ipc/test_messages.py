"""Messages on the local socket, however the byte stream is split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams
from npuserve.service.ipc import framing
from npuserve.service.ipc import messages as m

TO_ENGINE: list[m.ToEngine] = [
    m.Hello(),
    m.Submit(1, m.Request("r", list(range(500)), 7, 1.5, SamplingParams(logit_bias={3: 0.5}), frozenset([4]))),
    m.Cancel(1, 3, 2.5),
    m.Abort(2, "r"),
    m.FlushPrefixCache(3),
]


@given(st.lists(st.integers(1, 400)))
def test_splitter_any_chunks_give_same_messages(cuts: list[int]) -> None:
    whole, splitter, found, start = b"".join(map(m.encode, TO_ENGINE)), framing.Splitter(), [], 0
    for length in [*cuts, len(whole)]:
        found += splitter.feed(whole[start : start + length])
        start += length
    assert [m.decode_to_engine(data) for data in found] == TO_ENGINE


def test_messages_to_front_end_round_trip() -> None:
    timing = m.Timing(0.1, [0.2], 0.3, 0.4, 0.1, 9.0)
    outputs = [m.Output(1, [5], m.Finish("eos", 3, 0, 1, timing)), m.Output(2, error=("QueueFull", "full", 1.0))]
    for message in (m.Outputs(4, m.Load(1, 2, 0.5, 3.0), outputs), m.Reply(4, 1, 0)):
        [data] = framing.Splitter().feed(m.encode(message))
        assert m.decode_to_frontend(data) == message
