"""Prometheus metrics of all processes. docs/metrics.md gives their meaning. Clients cannot add label values.

Processes write to memory-mapped files in one folder (metrics_file.py). The supervisor sets PROMETHEUS_MULTIPROC_DIR for
its children before they import this module, and its metrics page adds the files up. Counters and histograms survive a
restart of the engine. Gauges cover live processes only.

Per-token and per-step samples go through a `tally`, and reach the page with the next `flush`.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from prometheus_client import Counter, Gauge, Histogram, values

from npuserve.service import logs, metrics_file

log = logging.getLogger(__name__)

if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    values.ValueClass = metrics_file.FileValue

PREFIX = "npuserve"

LATENCY = (.001, .002, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ANSWER = (*LATENCY, 320, 640, 1280, 2560)
GAP = (.0005, .001, .002, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5)
STEP = (.0005, .001, .002, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3, .5, 1, 2, 5)
KERNEL = tuple(1e-6 * m * 10**e for e in range(6) for m in (1, 2, 5))
MASK = (.00001, .00002, .00005, .0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1)
ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"{PREFIX}_{name}", text, labels)


def _gauge(name: str, text: str, *labels: str, mode: str = "livesum") -> Gauge:
    return Gauge(f"{PREFIX}_{name}", text, labels, multiprocess_mode=mode)  # type: ignore[arg-type]


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets)


# Front end
requests_total = _counter("requests_total", "Calls ended, by RPC and gRPC status code", "rpc", "code")
request_finish_total = _counter("request_finish_total", "Answers ended, by finish reason", "reason")
time_to_first_token_seconds = _histogram("time_to_first_token_seconds", "Arrival to the first token", LATENCY)
inter_token_latency_seconds = _histogram("inter_token_latency_seconds", "Gap between tokens of a request", GAP)
time_per_output_token_seconds = _histogram(
    "time_per_output_token_seconds", "(end to end - time to first token) / (tokens - 1), per request", GAP)
e2e_request_latency_seconds = _histogram("e2e_request_latency_seconds", "Arrival to the last token", ANSWER)
prefill_time_seconds = _histogram("prefill_time_seconds", "Time of the steps that computed an answer's prompt", LATENCY)
decode_time_seconds = _histogram("decode_time_seconds", "End of the prefill to an answer's last token", ANSWER)
request_prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens of an answer", TOKENS)
request_generation_tokens = _histogram("request_generation_tokens", "Generated tokens of an answer", TOKENS)
requests_on_target_total = _counter("requests_on_target_total", "Answers that met both latency targets")
streams_continued_total = _counter(
    "streams_continued_total", "Streams continued after an engine restart, or resumed by a client", "after")
requests_preparing = _gauge("requests_preparing", "Requests being parsed, tokenized or detokenized, or waiting for it")
preparation_rejections_total = _counter(
    "preparation_rejections_total", "Requests refused before the engine's queue", "kind", "why")
closed_connections_total = _counter("closed_connections_total", "Connections closed by a front end", "why")
stream_buffered_tokens = _gauge("stream_buffered_tokens", "Tokens generated and not yet read")
tls_certificate_expiry = _gauge(
    "tls_certificate_expiry_timestamp_seconds", "Unix time at which the certificates in use expire", "certificate",
    mode="livemin")
settings_not_read_total = _counter(
    "settings_not_read_total", "Reloads of a setting's files that failed; the last good ones stay in use", "setting")
ready = _gauge("ready", "1 while a front end accepts requests, else 0", mode="livemax")

# Engine
requests_running = _gauge("requests_running", "Requests in the batch")
requests_waiting = _gauge("requests_waiting", "Requests in the queue, preempted ones included")
requests_paused = _gauge("requests_paused", "Requests paused because their readers are slow")
predicted_ttft_seconds = _gauge(
    "predicted_ttft_seconds", "Expected time to first token of a request that arrives now, behind all that wait",
    mode="livemax")
queue_rejections_total = _counter("queue_rejections_total", "Requests refused at the queue", "why")
queue_time_seconds = _histogram("queue_time_seconds", "Arrival to the first step", LATENCY)
prompt_tokens_total = _counter("prompt_tokens_total", "Prompt tokens computed or found in the prefix cache")
generation_tokens_total = _counter("generation_tokens_total", "Tokens generated")
prefix_cache_queries_total = _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
prefix_cache_hits_total = _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
prefix_cache_misses_total = _counter(
    "prefix_cache_misses_total", "Requests that the prefix cache held nothing of, by reason", "reason")
kv_offload_queries_total = _counter(
    "kv_offload_queries_total", "Prompt tokens that the KV cache did not hold, looked up in host memory")
kv_offload_hits_total = _counter("kv_offload_hits_total", "Prompt tokens that came back from host memory")
kv_offload_bytes_total = _counter(
    "kv_offload_bytes_total", "Bytes of blocks and states saved to host memory and loaded from it", "direction")
kv_offload_corrupt_blocks_total = _counter(
    "kv_offload_corrupt_blocks_total", "Blocks and states in host memory whose checksum differed, forgotten")
kv_offload_dropped_blocks_total = _counter(
    "kv_offload_dropped_blocks_total", "Evicted blocks and states that were not saved to host memory")
kv_store_queries_total = _counter(
    "kv_store_queries_total", "Prompt tokens that neither the KV cache nor host memory held, looked up in the store")
kv_store_hits_total = _counter(
    "kv_store_hits_total", "Prompt tokens that need not be computed by what was loaded from the store")
kv_store_bytes_total = _counter(
    "kv_store_bytes_total", "Bytes of blocks and states saved to the store and loaded from it", "direction")
kv_store_failures_total = _counter(
    "kv_store_failures_total", "Calls of the store that failed; what it does not bring is computed", "reason")
kv_store_retries_total = _counter(
    "kv_store_retries_total", "Saves to the store that were begun again after a failure")
kv_store_available = _gauge("kv_store_available", "1 while the store is asked, 0 while it does not answer")
kv_offload_memory_bytes = _gauge(
    "kv_offload_memory_bytes", "Host memory for evicted blocks and states: used and free", "state")
tokens_in_vain_total = _counter(
    "tokens_in_vain_total", "Tokens computed for requests whose deadline passed before the first token")
preemptions_total = _counter("preemptions_total", "Requests preempted, to be recomputed")
kv_cache_usage_ratio = _gauge("kv_cache_usage_ratio", "Share of KV-cache blocks held by live requests")
kv_cache_blocks = _gauge("kv_cache_blocks", "KV-cache blocks: used, cached (reusable prefix, free) and free", "state")
state_slots = _gauge("state_slots", "Slots of fixed state: used, checkpoints and free", "state")
expert_imbalance = _gauge(
    "expert_imbalance", "Tokens of the busiest expert of a layer, divided by the mean of its experts", "layers",
    mode="livemax")
kv_cache_config_info = _gauge(
    "kv_cache_config_info", "1; the labels are the tokens of a KV-cache block and the number of blocks", "block_size",
    "num_blocks", mode="livemax")
step_seconds = _histogram(
    "step_seconds", "Launch of a step, or the end of the one before it, to its collected result", STEP, "phase", "mode")
grammar_compile_seconds = _histogram(
    "grammar_compile_seconds", "Arrival of a constrained request in the engine until its grammar is ready", LATENCY)
requests_compiling = _gauge("requests_compiling", "Requests that wait for the grammar of their constraint")
grammar_errors_total = _counter("grammar_errors_total", "Constrained requests that failed, by when", "when")
mask_seconds = _histogram("mask_seconds", "Wait of a step for the token masks of its constrained rows", MASK)
deferred_rows_total = _counter("deferred_rows_total", "Constrained rows computed again, since their mask was late")
constrained_tokens_total = _counter("constrained_tokens_total", "Tokens sampled under a mask of allowed tokens")
forced_tokens_total = _counter("forced_tokens_total", "Tokens that a constraint forced, and that no step sampled")
draft_tokens_total = _counter("draft_tokens_total", "Draft tokens that steps computed, by where they came from", "kind")
accepted_draft_tokens_total = _counter(
    "accepted_draft_tokens_total", "Draft tokens that became tokens of an answer, by where they came from", "kind")
acceptance_length_tokens = _histogram(
    "acceptance_length_tokens", "Accepted drafts of a row with drafts, by where they came from", ACCEPTED, "kind")
head_steps_total = _counter(
    "head_steps_total", "Steps of a model with a head for drafts or a smaller model, by whether they compute it",
    "head")
drafting_seconds_total = _counter("drafting_seconds_total", "Processor time of the engine's loop for drafts")
undrafted_tokens_total = _counter(
    "undrafted_tokens_total", "Tokens of requests that cannot have drafts, by reason", "reason")
step_tokens = _histogram("step_tokens", "Tokens computed in a step", TOKENS, "phase")
decode_tokens_total = _counter("decode_tokens_total", "Tokens of decode rows, by how they were computed", "mode")
step_host_gap_seconds = _histogram("step_host_gap_seconds", "Device idle between steps, waiting for the host", STEP)
lengths_lag_seconds = _histogram(
    "lengths_lag_seconds", "Launch of a captured step to the end of the update of its lengths", KERNEL)
kernel_latency_seconds = _histogram(
    "kernel_latency_seconds", "One kernel call on a sampled step", KERNEL, "kernel", "phase", "backend")
timed_step_seconds_total = _counter(
    "timed_step_seconds_total", "Device time of the steps whose kernels were timed", "phase")
kernel_fallback_total = _counter(
    "kernel_fallback_total", "Kernels computed by their golden function on this backend", "kernel", "backend")
cpu_kernels_info = _gauge(
    "cpu_kernels_info", "1; the labels describe the CPU kernels in use", "isa", "gemm", "weights", mode="livemax")
cpu_peak_flops = _gauge(
    "cpu_peak_flops", "Operations per second of one thread, measured when the model was loaded", "isa", "numbers",
    mode="livemax")
cancel_to_free_seconds = _histogram("cancel_to_free_seconds", "Arrival of a cancel until its blocks are free", STEP)
engine_heartbeat = _gauge(
    "engine_heartbeat_seconds", "Time of the engine's last heartbeat, on the monotonic clock", mode="livemax")

# Supervisor
engine_restarts_total = _counter("engine_restarts_total", "Restarts of the engine process")
process_failures_total = _counter(
    "process_failures_total", "Ends of child processes that were followed by a restart", "process", "why")
engine_loading_seconds = _gauge(
    "engine_loading_seconds", "Time for which the engine has been loading; 0 when it is not", mode="livemax")
metrics_files_skipped_total = _counter(
    "metrics_files_skipped_total", "Unreadable metrics files, whose counts are lost")
build_info = _gauge(
    "build_info", "1; the version is in the labels", "version", "torch", "backend", "model", mode="livemax")
target_seconds = _gauge(
    "target_seconds", "Latency targets of an answer: ttft, and the mean of itl", "latency", mode="livemax")
requests_limit = _gauge(
    "requests_limit", "The largest batch (running: max_num_seqs) and queue (waiting: max_queue)", "state",
    mode="livemax")
resident_memory_bytes = _gauge(
    "resident_memory_bytes", "Resident memory of each process; 0 while it is not running", "process")

disk_free_bytes = _gauge("disk_free_bytes", "Free space of the disk of TMPDIR", mode="livemax")

# All processes
metrics_files_full_total = _counter(
    "metrics_files_full_total", "Times that a process found no disk space for its metrics, and kept them in memory")
log_lines_dropped_total = _counter("log_lines_dropped_total", "Log lines dropped because the log queue was full")

# Label values that start at 0. A rate needs two samples, so an alert would otherwise miss the first event.
KNOWN: dict[Counter, tuple[tuple[str, ...], ...]] = {
    requests_total: tuple(
        (rpc, code) for rpc in ("Generate", "StreamGenerate", "vllm.Generate")
        for code in ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED",
                     "UNAUTHENTICATED", "UNAVAILABLE")),
    request_finish_total: (("eos",), ("stop_token",), ("stop_string",), ("length",), ("deadline",), ("aborted",),
                           ("pooled",)),
    streams_continued_total: (("engine",), ("client",)),
    queue_rejections_total: (
        ("queue_full",), ("displaced",), ("client_limit",), ("deadline",), ("duplicate",), ("too_large",),
        ("front_end",)),
    process_failures_total: tuple(
        (process, why) for process in ("engine", "frontend", "openai")
        for why in ("died", "hung", "unusable", "not_started")),
    grammar_errors_total: (("compile",), ("answer",)),
    settings_not_read_total: (("api_keys",), ("tls_cert",)),
    preparation_rejections_total: (
        ("read", "too_large"),
        *((kind, why) for kind in ("read", "parse", "generate", "tokenize", "detokenize")
          for why in ("queue_full", "displaced", "client_limit", "timeout"))),
}


class Tally:
    """Buffer of samples of one histogram until `flush`. `observe` costs a tenth of `Histogram.observe`."""

    def __init__(self, child: Histogram):
        self._child = child
        self._bounds = [float(bound) for bound in child._upper_bounds]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._any = False

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._any = True

    def flush(self) -> None:
        """Add the buffered samples to the histogram."""
        if not self._any:
            return
        for bucket, count in zip(self._child._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(self._sum)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._any = False


_is_full = False  # values wait in memory for space on the disk
_tallies: list[Tally] = []
_fed: list[tuple[Tally, Callable[[], Iterable[float]]]] = []
_fed_gauges: list[tuple[Gauge, Callable[[], Mapping[str, float]]]] = []


@cache
def tally(histogram: Histogram, *labels: str) -> Tally:
    """Return the buffer for these labels. There is one per process."""
    buffer = Tally(histogram.labels(*labels) if labels else histogram)
    _tallies.append(buffer)
    return buffer


def feed(histogram: Histogram, take: Callable[[], Iterable[float]]) -> None:
    """Observe at each `flush` the samples that `take` returns."""
    _fed.append((tally(histogram), take))


def feed_gauge(gauge: Gauge, take: Callable[[], Mapping[str, float]]) -> None:
    """Set at each `flush` the values that `take` returns by the gauge's label."""
    _fed_gauges.append((gauge, take))


def flush() -> None:
    """Write all buffered samples to the metrics page.

    Call it several times a second, and when the process becomes idle.
    """
    for buffer, take in _fed:
        for sample in take():
            buffer.observe(sample)
    for gauge, take_values in _fed_gauges:
        for label, value in take_values().items():
            gauge.labels(label).set(value)
    for buffer in _tallies:
        buffer.flush()
    if dropped := logs.take_dropped():
        log_lines_dropped_total.inc(dropped)
    _report_space(metrics_file.store())


def _report_space(error: OSError | None) -> None:
    """Log and count that the metrics files have no space, and log that they have space again. error: None for space."""
    global _is_full
    if bool(error) is _is_full:
        return
    _is_full = bool(error)
    if error:
        metrics_files_full_total.inc()
        logs.event(log, "no space for metrics, which wait in memory", level=logging.ERROR, error=str(error))
    else:
        logs.event(log, "metrics are written again", level=logging.WARNING)
