"""Metrics, log fields and trace of the answers of one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npuserve.service import metrics
from npuserve.service.config import ServerConfig
from npuserve.service.frontend.response import REASONS
from npuserve.service.ipc import messages
from npuserve.service.streams.stream import Stream
from npuserve.v1 import generate_pb2 as pb

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace

REASON_NAMES = {number: name for name, number in REASONS.items()}


class CallSummary:
    """Summary of a call. `finished` is called once for each sample, or once for a call with one answer.

    model: name of the served model, for the trace.
    samples: number of samples.
    fields: fields of the call's log line, to which the summary is added at each finish. With several samples, `reason`
        has the reasons in order of index, `cached_tokens` belongs to the first sample, and `generated_tokens` is a sum.
        `ttft` is the shortest time to a first token, `e2e` the longest time to a last one.
    trace: None for no trace. It gets the phases of the sample that ends last.
    """

    def __init__(self, config: ServerConfig, model: str, samples: int, fields: dict[str, Any], trace: Trace | None):
        self._config = config
        self._model = model
        self._samples = samples
        self._fields = fields
        self._trace = trace
        self._reasons: dict[int, str] = {}  # by index
        self._first_token: float | None = None  # of all samples, time.monotonic() seconds
        if samples > 1:
            fields["samples"] = samples

    def finished(self, finish: pb.Finish, timing: messages.Timing, stream: Stream) -> None:
        """Record the end of an answer. timing: the engine's."""
        usage = finish.usage
        index = stream.request.index
        fields = self._fields
        reason = REASON_NAMES[finish.reason]
        self._reasons[index] = reason
        fields["reason"] = ",".join(self._reasons[i] for i in sorted(self._reasons))
        if index == 0:
            fields["cached_tokens"] = usage.cached_tokens
        fields["generated_tokens"] = fields.get("generated_tokens", 0) + usage.generated_tokens
        metrics.request_finish_total.labels(reason).inc()
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.request_generation_tokens.observe(usage.generated_tokens)
        metrics.prefill_time_seconds.observe(sum(timing.prefill_chunks))
        metrics.decode_time_seconds.observe(timing.decode)
        if stream.first_token is not None and stream.last_token is not None:
            self._observe_latency(usage.generated_tokens, stream.first_token, stream.last_token, stream.request.arrival)
        if self._trace and len(self._reasons) == self._samples:
            self._trace.finished(timing, self._model, self._first_token)

    def _observe_latency(self, generated: int, first_token: float, last_token: float, arrival: float) -> None:
        """Record times of the first and the last token. The times are time.monotonic() seconds."""
        ttft = first_token - arrival
        e2e = last_token - arrival
        tpot = (e2e - ttft) / (generated - 1) if generated > 1 else 0.0
        metrics.e2e_request_latency_seconds.observe(e2e)
        if generated > 1:
            metrics.time_per_output_token_seconds.observe(tpot)
        if ttft <= self._config.target_ttft_seconds and tpot <= self._config.target_itl_seconds:
            metrics.requests_on_target_total.inc()
        self._first_token = first_token if self._first_token is None else min(self._first_token, first_token)
        fields = self._fields
        fields["ttft"] = round(min(fields.get("ttft", ttft), ttft), 6)
        fields["e2e"] = round(max(fields.get("e2e", e2e), e2e), 6)
