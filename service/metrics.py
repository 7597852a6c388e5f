"""Every metric, named once. See docs/metrics.md for meanings; labels are bounded, nothing a client sends is one.

Processes share a folder of memory-mapped values (prometheus_client's multiprocess mode, PROMETHEUS_MULTIPROC_DIR,
which the supervisor sets for its children before they import this), and the supervisor's metrics page adds them up.
So counters and histograms survive an engine's restart, and gauges are those of the living.

What is counted with every token or step goes through a `tally`, and to the page with the owner's next `flush`.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from npuserve.service import logs

PREFIX = "npuserve"

LATENCY = (.001, .002, .005, .01, .02, .04, .06, .08, .1, .15, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
GAP = (.0005, .001, .002, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5)
STEP = (.0005, .001, .002, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3, .5, 1, 2, 5)
KERNEL = tuple(1e-6 * m * 10**e for e in range(6) for m in (1, 2, 5))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


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
e2e_request_latency_seconds = _histogram("e2e_request_latency_seconds", "Arrival to the last token", LATENCY)
prefill_time_seconds = _histogram("prefill_time_seconds", "Steps that computed an answer's prompt", LATENCY)
decode_time_seconds = _histogram("decode_time_seconds", "From then to an answer's last token", LATENCY)
request_prompt_tokens = _histogram("request_prompt_tokens", "Prompt tokens of an answer", TOKENS)
request_generation_tokens = _histogram("request_generation_tokens", "Generated tokens of an answer", TOKENS)
requests_on_target_total = _counter("requests_on_target_total", "Answers that kept both latency targets")
streams_continued_total = _counter(
    "streams_continued_total", "Streams that went on after their engine's death, or that a client resumed", "after")
requests_preparing = _gauge("requests_preparing", "Requests that are parsed, tokenized or detokenized, or wait for it")
preparation_rejections_total = _counter(
    "preparation_rejections_total", "Requests refused before the engine's queue", "kind", "why")
stream_buffered_tokens = _gauge("stream_buffered_tokens", "Tokens made and not yet taken by their readers")
tls_certificate_expiry = _gauge(
    "tls_certificate_expiry_timestamp_seconds", "Unix time of the end of the certificates in use", "certificate",
    mode="livemin")
settings_not_read_total = _counter(
    "settings_not_read_total", "Times that a setting's files were unusable and the last good ones stayed", "setting")
ready = _gauge("ready", "1 while a front end takes requests, else 0", mode="livemax")

# Engine
requests_running = _gauge("requests_running", "Requests in the batch")
requests_waiting = _gauge("requests_waiting", "Requests in the queue, preempted ones included")
requests_paused = _gauge("requests_paused", "Requests that wait for their slow readers")
queue_rejections_total = _counter("queue_rejections_total", "Requests refused at the queue", "why")
queue_time_seconds = _histogram("queue_time_seconds", "Arrival to the first step", LATENCY)
prompt_tokens_total = _counter("prompt_tokens_total", "Prompt tokens computed or found in the prefix cache")
generation_tokens_total = _counter("generation_tokens_total", "Tokens generated")
prefix_cache_queries_total = _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache")
prefix_cache_hits_total = _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
tokens_in_vain_total = _counter(
    "tokens_in_vain_total", "Tokens computed for requests that their deadline ended before a first token")
preemptions_total = _counter("preemptions_total", "Requests whose blocks were taken back, to be recomputed")
kv_cache_usage_ratio = _gauge("kv_cache_usage_ratio", "Share of KV-cache blocks that live requests hold")
kv_cache_blocks = _gauge("kv_cache_blocks", "KV-cache blocks: used, cached (reusable prefix, free) and free", "state")
step_seconds = _histogram(
    "step_seconds", "Launch of a step, or the end of the one before it, to its collected result", STEP, "phase", "mode")
step_tokens = _histogram("step_tokens", "Tokens computed in a step", TOKENS, "phase")
decode_tokens_total = _counter("decode_tokens_total", "Tokens of decode rows, by how they were computed", "mode")
step_host_gap_seconds = _histogram("step_host_gap_seconds", "The device idle between steps, waiting for the host", STEP)
kernel_latency_seconds = _histogram(
    "kernel_latency_seconds", "One kernel call on a sampled step", KERNEL, "kernel", "phase", "backend")
timed_step_seconds_total = _counter(
    "timed_step_seconds_total", "The device at work on the steps whose kernels were timed", "phase")
kernel_fallback_total = _counter(
    "kernel_fallback_total", "Kernels served by their golden function for want of an own one", "kernel", "backend")
cpu_kernels_info = _gauge(
    "cpu_kernels_info", "1; what the CPU kernels run on is in the labels", "isa", "gemm", "weights", mode="livemax")
cpu_peak_flops = _gauge(
    "cpu_peak_flops", "Operations a second of one thread, as measured when the model was loaded", "isa", "numbers",
    mode="livemax")
cancel_to_free_seconds = _histogram("cancel_to_free_seconds", "A cancel's arrival to its blocks being free", STEP)
engine_heartbeat = _gauge(
    "engine_heartbeat_seconds", "The engine's last sign of life, by the machine's monotonic clock", mode="livemax")

# Supervisor
engine_restarts_total = _counter("engine_restarts_total", "Times the engine process was started again")
process_failures_total = _counter(
    "process_failures_total", "Lives of processes that ended and were followed by another", "process", "why")
engine_loading_seconds = _gauge(
    "engine_loading_seconds", "Time that the engine has been loading; 0 when it is not", mode="livemax")
metrics_files_skipped_total = _counter(
    "metrics_files_skipped_total", "Files of metrics that could not be read, and whose counts are lost")
build_info = _gauge(
    "build_info", "1; the version is in the labels", "version", "torch", "backend", "model", mode="livemax")
target_seconds = _gauge(
    "target_seconds", "What an answer must keep to be on target: ttft, and itl in the mean", "latency", mode="livemax")
requests_limit = _gauge(
    "requests_limit", "The largest batch (running: max_num_seqs) and queue (waiting: max_queue)", "state",
    mode="livemax")
resident_memory_bytes = _gauge(
    "resident_memory_bytes", "Resident memory of each process; 0 while it is dead", "process")

# All processes
log_lines_dropped_total = _counter("log_lines_dropped_total", "Log lines dropped because nobody read the ones before")

# Values that are worth a 0 before the first sample: a rate needs two samples, and an alert must not miss the first.
KNOWN: dict[Counter, tuple[tuple[str, ...], ...]] = {
    requests_total: tuple(
        (rpc, code) for rpc in ("Generate", "StreamGenerate")
        for code in ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED",
                     "UNAVAILABLE")),
    request_finish_total: (("eos",), ("stop_token",), ("stop_string",), ("length",), ("deadline",), ("aborted",)),
    streams_continued_total: (("engine",), ("client",)),
    queue_rejections_total: (
        ("queue_full",), ("displaced",), ("client_limit",), ("deadline",), ("duplicate",), ("too_large",),
        ("front_end",)),
    process_failures_total: tuple(
        (process, why) for process in ("engine", "frontend") for why in ("died", "hung", "unusable", "not_started")),
    settings_not_read_total: (("api_keys",), ("tls_cert",)),
    preparation_rejections_total: (
        ("read", "too_large"),
        *((kind, why) for kind in ("read", "parse", "generate", "tokenize", "detokenize")
          for why in ("queue_full", "displaced", "client_limit", "timeout"))),
}


class Tally:
    """Samples of a histogram's child, kept here until `flush`: a tenth of what `Histogram.observe` costs."""

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
        if not self._any:
            return
        for bucket, count in zip(self._child._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._child._sum.inc(self._sum)
        self._counts = [0] * len(self._bounds)
        self._sum, self._any = 0.0, False


_tallies: list[Tally] = []


@cache
def tally(histogram: Histogram, *labels: str) -> Tally:
    """The one of these labels, in this process."""
    made = Tally(histogram.labels(*labels) if labels else histogram)
    _tallies.append(made)
    return made


def flush() -> None:
    """Bring what this process's tallies have to the page. Call it some times a second, and when nothing goes on."""
    for one in _tallies:
        one.flush()
    if dropped := logs.take_dropped():
        log_lines_dropped_total.inc(dropped)
