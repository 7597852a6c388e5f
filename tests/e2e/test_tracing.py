"""A traced request of a real server: the collector's spans equal the timing that the client receives."""

from __future__ import annotations

import time

import pytest

from tests.e2e.brittle import COUNTING
from tests.e2e.server import request, serving
from tests.service.rpc.test_tracing import PARENT, SERVER_SPAN, TRACE
from tests.support.collector import Collector


@pytest.mark.slow
def test_each_chunk_of_a_prompt_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = Collector()
    ask = request(list(range(10, 410)), 20, ignore_eos=True)
    with serving("--max-num-batched-tokens", "128", "--otlp-endpoint", collector.url, **COUNTING) as server:
        call = server.stub.StreamGenerate(ask, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))
        timing = list(call)[-1].finish.timing
        deadline = time.monotonic() + 60
        while len(collector.spans) < 8 and time.monotonic() < deadline:
            time.sleep(0.02)
    collector.server.stop(None).wait()
    spans = sorted(collector.spans, key=lambda span: (span.start_time_unix_nano, span.name != SERVER_SPAN))
    assert [span.name for span in spans] == [
        SERVER_SPAN, "queue", *["prefill chunk"] * 4, "decode", "detokenize and send"]
    said = [timing.queue, *timing.prefill_chunks, timing.decode]
    assert len(said) == 6
    for span, phase in zip(spans[1:], said, strict=False):
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(phase.ToNanoseconds(), abs=2)
    assert spans[-1].end_time_unix_nano == spans[0].end_time_unix_nano
    assert spans[0].parent_span_id.hex() == PARENT
