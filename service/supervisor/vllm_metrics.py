"""Our metrics under vLLM's names.

The gauges by which an endpoint picker chooses a server are always on the page, while an engine runs. The others are for
dashboards and autoscalers made for vLLM (--metrics-vllm-aliases).

Names, types and labels follow vLLM's V1 engine. Older names are added if vLLM's dashboards still use them. Labels that
vLLM lacks are summed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from npuserve.service.supervisor.page_text import Family, Labels, Slot, header, samples

CACHE = "npuserve_kv_cache_config_info"
"""Present while an engine runs: the picker would otherwise read zeros of a dead engine as an idle server."""

# Our name without npuserve_ -> vLLM's names without vllm:, all without _total.
PICKER_NAMES: dict[str, tuple[str, ...]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc",),
    "kv_cache_config_info": ("cache_config_info",),
}
NAMES: dict[str, tuple[str, ...]] = {
    "kv_cache_usage_ratio": ("gpu_cache_usage_perc",),
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
           "aborted": "abort", "pooled": "stop"}
LABELS = {"block_size": "block_size", "num_blocks": "num_gpu_blocks"}
"""Our labels that vLLM has -> vLLM's."""


class Aliases:
    """Metrics under vLLM's names.

    families: our metrics by name.
    with_all: not only the picker's gauges.
    """

    def __init__(self, families: Mapping[str, Family], with_all: bool):
        self._families = families
        shown = [(PICKER_NAMES, True), (NAMES, False)] if with_all else [(PICKER_NAMES, True)]
        self._names = [(f"npuserve_{ours}", f"vllm:{name}", is_pickers) for names, is_pickers in shown
                       for ours, theirs in names.items() for name in theirs]
        self._texts: dict[str, str] = {}
        self._model = ""

    def text(self, changed: AbstractSet[str], model: str) -> str:
        """Return the lines of the page.

        changed: names of our metrics that have changed since the last call.
        model: value of the label model_name.
        """
        if model != self._model:
            self._model = model
            self._texts.clear()
        has_engine = bool(self._families[CACHE].groups)
        shown = []
        for ours, theirs, is_pickers in self._names:
            if ours in changed or theirs not in self._texts:
                self._texts[theirs] = "".join(_lines(self._families[ours], theirs, model))
            if has_engine or not is_pickers:
                shown.append(self._texts[theirs])
        return "".join(shown)


def _lines(family: Family, name: str, model: str) -> Iterator[str]:
    """Yield the lines of a metric under another name; none if it has no samples."""
    sums: defaultdict[Labels, defaultdict[Slot, float]] = defaultdict(lambda: defaultdict(float))
    for group in family.groups.values():
        labels = {"model_name": model, "engine": "0"}
        for label, value in group.labels:
            if label == "reason":
                labels["finished_reason"] = REASONS[value]
            elif label in LABELS:
                labels[LABELS[label]] = value
        total = sums[tuple(sorted(labels.items()))]
        for slot, number in group.values.items():
            total[slot] += number
    if sums:
        yield header(name, family.kind, family.documentation)
    for shown_labels, values in sums.items():
        yield samples(family.kind, name, shown_labels, values)
