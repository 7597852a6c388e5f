"""Our metrics under vLLM's names, for dashboards and autoscalers made for vLLM (--metrics-vllm-aliases).

Names, types and labels are those of vLLM's V1 engine, and older names if vLLM's dashboards still use them. Labels that
vLLM does not have are summed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

# Our name without npuserve_ -> vLLM's names without vllm:, all without _total.
NAMES = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "request_finish": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_time_seconds": ("request_prefill_time_seconds",),
    "decode_time_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens", "request_max_num_generation_tokens"),
    "step_tokens": ("iteration_tokens_total",),
}
REASONS = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length", "deadline": "length",
           "aborted": "abort"}


def aliases(found: Mapping[str, Metric], model: str) -> Iterator[Metric]:
    """Yield our samples under vLLM's names.

    found: metrics by our name.
    model: value of the label model_name.
    """
    for ours, theirs in NAMES.items():
        metric = found.get(f"npuserve_{ours}")
        for name in theirs if metric else ():
            assert metric
            made = Metric(f"vllm:{name}", metric.documentation, metric.type)
            sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
            for sample in metric.samples:
                labels = {"model_name": model, "engine": "0"}
                if "le" in sample.labels:
                    labels["le"] = sample.labels["le"]
                if "reason" in sample.labels:
                    labels["finished_reason"] = REASONS[sample.labels["reason"]]
                suffix = sample.name.removeprefix(metric.name)
                sums[f"vllm:{name}{suffix}", tuple(labels.items())] += sample.value
            for (full, pairs), value in sums.items():
                made.add_sample(full, dict(pairs), value)
            yield made
