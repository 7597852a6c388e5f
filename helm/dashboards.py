"""Generator of the chart's Grafana dashboards, npuserve/dashboards/*.json, panel by panel.

    python helm/dashboards.py [--check]

Each panel is a line or two: title, queries by legend, unit and description. `--check` writes nothing and fails if a
file is out of date. Every query contains SELECT: the variables at the top of a dashboard choose the servers. The
instance variable offers only instances of the chosen models.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from grafana import GREEN, ORANGE, RED, Dashboard, Panel, Row, dashboard_json

FOLDER = Path(__file__).parent / "npuserve/dashboards"
NAMESPACE = 'namespace=~"$namespace"'
SELECT = f'{NAMESPACE}, instance=~"$instance"'
FIRING = ('alertname=~"Npuserve.+"', 'alertstate="firing"')
NOW, LAST, BEFORE = "[$__rate_interval]", "[$baseline]", "[$baseline] offset $baseline"


# Queries


def of(metric: str, *where: str) -> str:
    """Return a selector of a metric for the chosen servers. where: further matchers."""
    return f"npuserve_{metric}{{{', '.join((SELECT, *where))}}}"


def of_vllm(metric: str, by: str) -> str:
    """Return a gauge under vLLM's name, aggregated over the chosen servers."""
    return f"sum by ({by}) (vllm:{metric}{{{SELECT}}})"


def total(metric: str, by: str = "", *where: str, how: str = "sum") -> str:
    """Return a gauge aggregated over the chosen servers."""
    return f"{how}{f' by ({by})' if by else ''} ({of(metric, *where)})"


def rate(metric: str, by: str = "", *where: str, over: str = NOW) -> str:
    """Return the rate per second of a counter over the chosen servers."""
    return f"sum{f' by ({by})' if by else ''} (rate({of(metric, *where)}{over}))"


def mean(histogram: str, by: str = "", *where: str, over: str = NOW) -> str:
    return f"{rate(f'{histogram}_sum', by, *where, over=over)} / {rate(f'{histogram}_count', by, *where, over=over)}"


def quantile(q: float, histogram: str, by: str = "", *where: str, over: str = NOW) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, *where, over=over)})"


def quantiles(histogram: str, *qs: float) -> dict[str, str]:
    return {f"p{100 * q:g}": quantile(q, histogram) for q in qs}


def share(part: str, whole: str) -> str:
    """Return a ratio, without a value where the denominator is 0."""
    return f"{part} / (({whole}) > 0)"


NPU = "{{instance}} {{id}}"


def npu(gauge: str) -> str:
    """Return a gauge of the NPU exporter for each NPU of every node: its series have no labels of servers."""
    return f"max by (instance, id) (npu_chip_info_{gauge})"


GPU = "{{Hostname}} {{gpu}}"


def gpu(gauge: str) -> str:
    """Return a gauge of NVIDIA's DCGM exporter for each GPU of every node."""
    return f"max by (Hostname, gpu) (DCGM_FI_DEV_{gauge})"


TTFT_TARGET, ITL_TARGET = (
    {"target": total("target_seconds", "", f'latency="{name}"', how="max")} for name in ("ttft", "itl"))
LIFE = [
    Panel("Ready by server", {"{{instance}}": total("ready", "instance", how="max")}, "short",
          "1 while a server takes requests; 0 while it loads, has no engine, or drains."),
    Panel("Resident memory", {"{{instance}} {{process}}": total("resident_memory_bytes", "instance, process")}, "bytes",
          "Supervisor, engine and front ends of each server, without ranks of tensor parallelism and other processes "
          "that these start. The container's limit holds for all of them.", stack="normal"),
    Panel("Free disk", {"{{instance}}": total("disk_free_bytes", "instance", how="min")}, "bytes",
          "Space of TMPDIR, where metrics and sockets of the processes are.", thresholds={RED: 0, GREEN: 1048576}),
    Panel("Engine's last sign of life", {
        "{{instance}}": total("engine_heartbeat_age_seconds", "instance", how="max")}, "s",
        "Grows while an engine is down, loads its model, or is stuck.", thresholds={GREEN: 0, RED: 30}),
    Panel("Engine restarts", {
        "{{instance}}": f"sum by (instance) (increase({of('engine_restarts_total')}{NOW}))"}, "short",
        "Times an engine process was started again after it died."),
]
MEMORY = [
    Panel("KV cache in use", {"{{instance}}": total("kv_cache_usage_ratio", "instance", how="max")}, "percentunit",
          "Share of each server's KV-cache blocks that live requests hold.",
          thresholds={GREEN: 0, ORANGE: 0.9, RED: 0.97}),
    Panel("KV-cache blocks", {"{{instance}} {{state}}": total("kv_cache_blocks", "instance, state")}, "short",
          "used: held by live requests; cached: free, but a reusable prefix; free.", stack="normal"),
    Panel("KV-cache size", {
        "{{instance}}: {{num_blocks}} blocks of {{block_size}} tokens": of("kv_cache_config_info")}, "short",
        "Size of each server's KV cache.", "bargauge"),
]
REQUESTS = [
    Panel("Requests", {
        "{{instance}} running": total("requests_running", "instance"),
        "{{instance}} waiting": total("requests_waiting", "instance"),
        "{{instance}} preparing": total("requests_preparing", "instance")}, "short",
        "In the batch, in the queue, and in preparation (chat template, tokenizer) of each server.", stack="normal"),
]


def saturation(state: str) -> str:
    """Return the share of a server's limit used by its running or waiting requests, by instance."""
    limit = total("requests_limit", "instance", f'state="{state}"', how="max")
    return share(total(f"requests_{state}", "instance"), limit)


SATURATION = [
    Panel("Saturation", {"{{instance}} seats": saturation("running"), "{{instance}} queue": saturation("waiting")},
          "percentunit", "Running requests of max_num_seqs, waiting ones of max_queue. A full queue refuses requests.",
          thresholds={GREEN: 0, ORANGE: 0.9, RED: 1}),
]
EXPIRY = "tls_certificate_expiry_timestamp_seconds"
GENERATION = 'rpc=~"Generate|StreamGenerate|ResumeStream|vllm[.]Generate"'
OF_GATEWAYS = 'rpc=~"vllm[.].*"'
ERRORS = (GENERATION, 'code=~"UNKNOWN|INTERNAL|UNAVAILABLE|DATA_LOSS"')
"""Errors of the server itself; the alerts NpuserveErrorsBurn and NpuserveErrorRate count the same."""
REFUSALS = {
    "{{why}}": ("queue_rejections_total", 'why=~"queue_full|displaced|front_end|deadline"'),
    "{{why}} in preparation": ("preparation_rejections_total", 'why=~"queue_full|displaced|timeout"'),
    "{{code}}": ("requests_total", GENERATION, 'code="UNAUTHENTICATED"')}
"""Legend -> counter and matchers of refusals; the alert NpuserveRefusalsBurn counts the same."""


# The first row. It is about all servers of the namespace: the variable $instance offers no server that has been dead
# for longer than the range.


def of_namespace(metric: str, *where: str) -> str:
    """Return a selector of a metric for all servers of the namespace. The name is complete."""
    return f"{metric}{{{', '.join((NAMESPACE, *where))}}}"


def rate_in_namespace(metric: str, by: str = "", *where: str) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({of_namespace(f'npuserve_{metric}', *where)}[5m]))"


CALLS = f"({rate_in_namespace('requests_total', '', GENERATION)} > 0)"
REFUSED = " or ".join(f"rate({of_namespace(f'npuserve_{metric}', *where)}[5m])" for metric, *where in REFUSALS.values())
WANTED = " or ".join((
    f"sum ({of_namespace('npuserve:replicas_wanted')})",
    f"count ({of_namespace('npuserve:known_server')})",
    f"count (last_over_time({of_namespace('npuserve:known_server')}[1h]))",
    f"count (group by (namespace, pod, instance) ({of_namespace('npuserve_ready')}))"))
"""Replicas that kube-state-metrics knows of; else targets that are or were servers; else servers."""
READY = (f"count (max by (namespace, pod, instance) ({of_namespace('npuserve_ready')}) == 1)"
         f" or 0 * ({WANTED})")


def latency_stat(title: str, histogram: str, latency: str, description: str) -> Panel:
    """Return the p95 of a latency in 5 minutes, and its share of the target, which has the colour."""
    p95 = f"(histogram_quantile(0.95, {rate_in_namespace(f'{histogram}_bucket', 'le')}) >= 0)"  # no NaN without calls
    target = of_namespace("npuserve_target_seconds", f'latency="{latency}"')
    return Panel(title, {"p95": p95, "of the target": f"{p95} / max ({target})"}, "percentunit", description, "stat", 3,
                 4, {GREEN: 0, ORANGE: 0.8, RED: 1}, plain={"p95": "s"}, empty="no calls", instant=True)


def first(title: str, queries: dict[str, str], unit: str, description: str, width: int = 3, **more: Any) -> Panel:
    return Panel(title, queries, unit, description, more.pop("kind", "stat"), width, 4, instant=True, **more)


NOW_ROW = Row("Now: is it up, is it slow, why", [
    first("Ready", {"ready": READY, "wanted": WANTED}, "short",
          "Servers that take requests, of those that are wanted: replicas (kube-state-metrics), else targets that are "
          "or within an hour were servers.", thresholds={RED: 0, GREEN: 1}, plain={"wanted": "short"}),
    first("Refused", {"share of the calls": f"sum ({REFUSED}) / {CALLS}"}, "percentunit",
          "Share of generation calls refused for want of room or time, or for their key. NpuserveRefusalsBurn fires at "
          "14.4 % of an hour.", 2, thresholds={GREEN: 0, ORANGE: 0.01, RED: 0.06}, empty="no calls"),
    first("Refused, by reason", {
        legend: f"{rate_in_namespace(metric, legend[2:legend.index('}')], *where)} > 0"
        for legend, (metric, *where) in REFUSALS.items()}, "reqps",
        "Calls refused per second, by reason.", 4, kind="bargauge", empty="none"),
    latency_stat("TTFT", "time_to_first_token_seconds", "ttft",
                 "95 % of the first tokens took at most this time. NpuserveTtftHigh fires above the target."),
    latency_stat("ITL", "time_per_output_token_seconds", "itl",
                 "95 % of the answers took at most this mean time a token. NpuserveItlHigh fires above the target."),
    first("Errors", {"share of the calls": f"{rate_in_namespace('requests_total', '', *ERRORS)} / {CALLS}"},
          "percentunit", "Share of generation calls that ended in an error of the server: UNKNOWN, INTERNAL, "
          "UNAVAILABLE, DATA_LOSS. NpuserveErrorsBurn fires at 1.44 % of an hour.", 2,
          thresholds={GREEN: 0, ORANGE: 0.001, RED: 0.0144}, empty="no calls"),
    first("Restarts in 1 h", {
        "processes": f"sum (increase({of_namespace('npuserve_process_failures_total')}[1h]))"}, "none",
        "Engines and front ends that died and were started again within the last hour.", 2,
        thresholds={GREEN: 0, ORANGE: 0.5, RED: 2.5}, empty="no server"),
    first("Firing alerts", {
        "{{severity}}: {{alertname}}": f"count by (severity, alertname) ({of_namespace('ALERTS', *FIRING)})"}, "short",
        "Alerts of npuserve that fire, with the number of servers. The dashboard Runbooks says what to do.", 5,
        kind="bargauge", empty="none"),
])

OPERATORS = Dashboard("npuserve-operators", "npuserve / Operators", "Is it up, is it slow, and why.", [
    NOW_ROW,
    Row("Traffic", [
        Panel("Calls by code", {"{{code}}": rate("requests_total", "code")}, "reqps",
              "Calls of all RPCs ended, by gRPC status.", stack="normal"),
        Panel("Answers by reason", {"{{reason}}": rate("request_finish_total", "reason")}, "reqps",
              "How generation ended: eos, stop string or token, length, deadline, aborted.", stack="normal"),
        Panel("Goodput", {
            "answers": rate("request_finish_total"), "on target": rate("requests_on_target_total")}, "reqps",
            "Answers, and those of them that kept both latency targets."),
        Panel("Tokens", {
            "prompts": rate("prompt_tokens_total"), "generated": rate("generation_tokens_total")}, "tokens/s",
            "Prompt tokens (computed or from the prefix cache) and generated ones, per second."),
        Panel("Lengths", {
            "prompt p50": quantile(0.5, "request_prompt_tokens"), "prompt p95": quantile(0.95, "request_prompt_tokens"),
            "answer p50": quantile(0.5, "request_generation_tokens"),
            "answer p95": quantile(0.95, "request_generation_tokens")}, "short",
            "Tokens of the requests that ended: what the load is made of."),
        Panel("Errors and refusals", {
            "{{rpc}} {{code}}": rate("requests_total", "rpc, code", *ERRORS),
            "refused: {{why}}": rate("queue_rejections_total", "why"),
            "not prepared: {{kind}}, {{why}}": rate("preparation_rejections_total", "kind, why"),
            "connections closed: {{why}}": rate("closed_connections_total", "why")}, "reqps",
            "Calls that ended in an error of the server, requests refused at the queue or before it, and connections "
            "that a front end closed, by reason."),
    ]),
    Row("Latency", [
        Panel("Time to first token", quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99) | TTFT_TARGET, "s",
              "Arrival at the front end to the first token.", lines=("target",)),
        Panel("Inter-token latency", quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99) | ITL_TARGET, "s",
              "Gap between tokens of a request; long prompts of others show in the p99.", lines=("target",)),
        Panel("Time per output token", quantiles("time_per_output_token_seconds", 0.5, 0.95, 0.99) | ITL_TARGET, "s",
              "(end to end − time to first token) / (tokens − 1), one sample a request: what goodput is judged by.",
              lines=("target",)),
        Panel("End to end", quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99), "s",
              "Arrival to the last token."),
        Panel("Where the time goes", {
            "queue": mean("queue_time_seconds"), "prefill": mean("prefill_time_seconds"),
            "decode": mean("decode_time_seconds")}, "s", "Mean seconds of a request in each phase.", stack="normal"),
        Panel("Time to first token, spread", {"{{le}}": rate("time_to_first_token_seconds_bucket", "le")}, "s",
              "All first tokens by how long they took: two bands are two kinds of requests.", "heatmap"),
    ]),
    Row("Queue", [
        *REQUESTS,
        *SATURATION,
        Panel("Predicted time to first token", {
            "{{instance}}": total("predicted_ttft_seconds", "instance", how="max")} | TTFT_TARGET, "s",
            "Expected for a request that arrives now and waits for all that wait. Autoscalers compare it with the "
            "target.",
            lines=("target",)),
        Panel("Queue time", quantiles("queue_time_seconds", 0.5, 0.95, 0.99), "s", "Arrival to the first step."),
        Panel("Unread tokens", {"{{instance}}": total("stream_buffered_tokens", "instance")}, "short",
              "Made and not yet taken by their clients: slow readers show here."),
        Panel("Paused for their readers", {"{{instance}}": total("requests_paused", "instance")}, "short",
              "Requests that compute nothing until their clients read."),
        Panel("Tokens in vain", {"{{instance}}": rate("tokens_in_vain_total", "instance")}, "tokens/s",
              "Computed for requests whose deadline came before their first token."),
        Panel("Streams that went on", {"after {{after}}": rate("streams_continued_total", "after")}, "reqps",
              "After the death of their engine, or where their client resumed them."),
        Panel("Certificates", {
            "{{instance}} {{certificate}}":
                f"{total(EXPIRY, 'instance, certificate', how='min')} - time()"},
              "s", "Time until the first of the certificates in use ends, negative after it; empty without TLS.",
              lowest=None),
    ]),
    Row("KV cache", [
        *MEMORY,
        Panel("Preemptions", {"{{instance}}": rate("preemptions_total", "instance")}, "ops",
              "Requests whose blocks were taken back, to be computed again: the cache is too small for the batch.",
              thresholds={GREEN: 0, ORANGE: 0.1, RED: 1}),
        Panel("Prefix hits", {
            "of prompt tokens": share(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total"))},
            "percentunit", "Share of the prompt tokens looked up that the cache held."),
        Panel("Prefix misses", {"{{reason}}": rate("prefix_cache_misses_total", "reason")}, "reqps",
              "Requests that the cache held nothing of. no_state: their blocks were cached without a checkpoint of the "
              "state."),
        Panel("Host memory hits", {
            "of what the cache lacked": share(rate("kv_offload_hits_total"), rate("kv_offload_queries_total"))},
            "percentunit", "Share of the prompt tokens that the cache lacked and that came back from host memory."),
        Panel("Host memory copies", {"{{direction}}": rate("kv_offload_bytes_total", "direction")}, "Bps",
              "Evicted blocks that are saved to host memory, and those that are loaded from it."),
        Panel("Host memory", {"{{instance}} {{state}}": total("kv_offload_memory_bytes", "instance, state")}, "bytes",
              "Host memory for evicted blocks and states.", stack="normal"),
        Panel("Host memory losses", {
            "corrupt": rate("kv_offload_corrupt_blocks_total"), "not saved": rate("kv_offload_dropped_blocks_total")},
            "cps", "Blocks and states whose checksum differed, and evicted ones that were not saved."),
        Panel("Store hits", {
            "of what was looked up": share(rate("kv_store_hits_total"), rate("kv_store_queries_total"))},
            "percentunit", "Share of the prompt tokens looked up in the store that it brought."),
        Panel("Store copies", {"{{direction}}": rate("kv_store_bytes_total", "direction")}, "Bps",
              "Blocks and states that are saved to the store that servers share, and those that are loaded from it."),
        Panel("Store failures", {
            "{{reason}}": rate("kv_store_failures_total", "reason"), "retries": rate("kv_store_retries_total")}, "cps",
            "Calls of the store that failed, and saves that were begun again. What it does not bring is computed."),
        Panel("Store", {"{{instance}}": total("kv_store_available", "instance", how="max")}, "short",
              "1 while the store is asked; 0 without one, and while it does not answer."),
        Panel("State slots", {"{{instance}} {{state}}": total("state_slots", "instance, state")}, "short",
              "Models with linear attention: slots of requests, checkpoints of prefixes, free ones.", stack="normal"),
        Panel("Imbalance of experts", {"{{instance}} layers {{layers}}": total(
            "expert_imbalance", "instance, layers", how="max")}, "short",
              "Mixtures of experts: tokens of a layer's busiest expert, divided by the mean of its experts."),
    ]),
    Row("Constraints", [
        Panel("Grammar compilation", quantiles("grammar_compile_seconds", 0.5, 0.99), "s",
              "Arrival of a constrained request until its grammar is ready; other requests do not wait for it."),
        Panel("Waiting for grammars", {"{{instance}}": total("requests_compiling", "instance")}, "short",
              "Requests whose constraints are being compiled."),
        Panel("Token masks", quantiles("mask_seconds", 0.5, 0.99), "s",
              "Wait of a step for the masks of its constrained rows, while the device computes."),
        Panel("Constrained tokens", {
            "{{instance}} sampled": rate("constrained_tokens_total", "instance"),
            "{{instance}} deferred for their mask": rate("deferred_rows_total", "instance"),
            "{{instance}} forced": rate("forced_tokens_total", "instance")}, "tokens/s",
            "Tokens sampled under a mask, and tokens that a constraint forced and that no step sampled."),
        Panel("Failed constraints", {"{{when}}": rate("grammar_errors_total", "when")}, "reqps",
              "Requests that failed because of their constraint: at its compilation, or in the answer."),
    ]),
    Row("Speculative decoding", [
        Panel("Drafts", {
            "{{kind}} computed": rate("draft_tokens_total", "kind"),
            "{{kind}} accepted": rate("accepted_draft_tokens_total", "kind")}, "tokens/s",
            "Draft tokens that steps computed, and those that became tokens of answers, from earlier text (suffix), "
            "from the model's head (mtp) or from a smaller model (model)."),
        Panel("Acceptance length", {
            "{{kind}} mean": mean("acceptance_length_tokens", "kind"),
            "{{kind}} p90": quantile(0.9, "acceptance_length_tokens", "kind")}, "short",
            "Accepted drafts of a row with drafts; the row yields one token more."),
        Panel("Accepted drafts, spread", {"{{le}}": rate("acceptance_length_tokens_bucket", "le")}, "short",
              "Rows with drafts by their accepted drafts.", "heatmap"),
        Panel("Time for drafts", {"share of the time": rate("drafting_seconds_total")}, "percentunit",
              "Share of the time that the engine's loop searches and chooses drafts."),
        Panel("Steps with the head for drafts", {"{{head}}": rate("head_steps_total", "head")}, "ops",
              "Steps of a model with a head for multi-token prediction, or with a smaller model, by whether they "
              "compute it. `speculate` auto stops a head that does not pay.", stack="normal"),
        Panel("Tokens without drafts", {"{{reason}}": rate("undrafted_tokens_total", "reason")}, "tokens/s",
              "Tokens of requests that cannot have drafts."),
    ]),
    Row("Gateways", [
        Panel("Calls of gateways", {"{{rpc}}": rate("requests_total", "rpc", OF_GATEWAYS)}, "reqps",
              "Calls of vllm.grpc.engine.VllmEngine that ended, by RPC: requests, and the polls of smg.",
              stack="normal"),
        Panel("Errors to gateways", {
            "{{rpc}} {{code}}": rate("requests_total", "rpc, code", OF_GATEWAYS, 'code!="OK"')}, "reqps",
            "Calls of gateways that did not end with OK. After RESOURCE_EXHAUSTED and UNAVAILABLE smg tries again."),
        Panel("Requests that endpoint pickers see", {
            "{{instance}} running": of_vllm("num_requests_running", "instance"),
            "{{instance}} waiting": of_vllm("num_requests_waiting", "instance")}, "short",
            "Gauges that an endpoint picker scrapes, under vLLM's names.", stack="normal"),
        Panel("KV cache that endpoint pickers see", {
            "{{instance}}": of_vllm("kv_cache_usage_perc", "instance")}, "percentunit",
            "Gauge that an endpoint picker scrapes, under vLLM's name.",
            thresholds={GREEN: 0, ORANGE: 0.8, RED: 0.97}),
    ]),
    Row("NPUs", [
        Panel("Health", {NPU: npu("health_status")}, "short",
              "1 healthy, 0 not, -1 unknown. From the NPU exporter of the nodes, as all of this row.",
              thresholds={RED: 0, GREEN: 1}, lowest=-1),
        Panel("Temperature", {NPU: npu("temperature")}, "celsius", "Temperature of each NPU.",
              thresholds={GREEN: 0, ORANGE: 75, RED: 90}),
        Panel("Device memory", {NPU: share(npu("hbm_used_memory"), npu("hbm_total_memory"))}, "percentunit",
              "Share of each NPU's memory in use, by all processes. The KV cache takes nine tenths of the free memory "
              "at the start."),
        Panel("AI cores", {NPU: npu("utilization")}, "percent", "Utilization of each NPU's AI cores."),
        Panel("Power", {NPU: npu("power")}, "watt", "Power of each NPU."),
        Panel("Fault code", {NPU: npu("error_code")}, "short", "0, or the code of a fault.",
              thresholds={GREEN: 0, RED: 1}),
    ]),
    Row("GPUs", [
        Panel("GPU utilization", {GPU: gpu("GPU_UTIL")}, "percent",
              "Share of the time in which a kernel ran. From the DCGM exporter of the nodes, as all of this row."),
        Panel("GPU temperature", {GPU: gpu("GPU_TEMP")}, "celsius", "Temperature of each GPU.",
              thresholds={GREEN: 0, ORANGE: 80, RED: 90}),
        Panel("GPU memory", {GPU: share(gpu("FB_USED"), f"{gpu('FB_USED')} + {gpu('FB_FREE')}")}, "percentunit",
              "Share of each GPU's memory in use, by all processes. The KV cache takes nine tenths of the free memory "
              "at the start."),
        Panel("GPU power", {GPU: gpu("POWER_USAGE")}, "watt", "Power of each GPU."),
        Panel("GPU clock", {GPU: f"1e6 * {gpu('SM_CLOCK')}"}, "hertz",
              "Clock of the multiprocessors: throttling shows here."),
        Panel("GPU fault", {GPU: gpu("XID_ERRORS")}, "short", "0, or the last Xid error.",
              thresholds={GREEN: 0, RED: 1}),
    ]),
    Row("Life", [
        *LIFE,
        Panel("Ended processes", {
            "{{instance}} {{process}} {{why}}":
                f"sum by (instance, process, why) (increase({of('process_failures_total')}{NOW}))"}, "short",
              "Lives of processes that ended and were followed by another, by the reason."),
        Panel("Loading", {"{{instance}}": total("engine_loading_seconds", "instance", how="max")}, "s",
              "For how long the engine has been loading its model; 0 when it is not."),
        Panel("Unusable files and lost log lines", {
            "{{instance}} {{setting}} unusable":
                f"sum by (instance, setting) (increase({of('settings_not_read_total')}{NOW}))",
            "{{instance}} metrics skipped": f"sum by (instance) (increase({of('metrics_files_skipped_total')}{NOW}))",
            "{{instance}} metrics not stored": f"sum by (instance) (increase({of('metrics_files_full_total')}{NOW}))",
            "{{instance}} log lines dropped": f"sum by (instance) (increase({of('log_lines_dropped_total')}{NOW}))"},
              "short", "Each is a fault that ends nothing: the last good files stay, and lost lines delay nobody."),
        Panel("What runs", {
            "{{instance}}: {{model}}, npuserve {{version}}, torch {{torch}}, {{backend}}": of("build_info")},
            "short", "One line for each server whose model is loaded.", "bargauge"),
    ]),
])

DECODE = 'phase="decode"'
PICKED = ('kernel=~"$kernel"', 'phase=~"$phase"')
LATENCY = "kernel_latency_seconds"
EACH = ("kernel, phase", *PICKED)
KERNELS = Dashboard("npuserve-kernels", "npuserve / Kernels", "Every kernel's latency, and the steps.", [
    Row("All kernels", [
        Panel("Share of the step", {
            "{{kernel}}": rate(f"{LATENCY}_sum", "kernel", PICKED[1])}, "s",
            "How the time of the timed steps is divided among the kernels.", stack="percent", width=12),
        Panel("Covered by kernels", {"{{phase}}": share(
            rate(f"{LATENCY}_sum", "phase", PICKED[1]), rate("timed_step_seconds_total", "phase", PICKED[1]))},
            "percentunit", "Kernels' time beside the device's of the same steps; the rest is between the kernels.",
            width=6, thresholds={RED: 0, ORANGE: 0.9, GREEN: 0.95}),
        Panel("Kernels that fall back", {
            "{{kernel}} on {{backend}}": f"{total('kernel_fallback_total', 'kernel, backend')} > 0"}, "short",
              "Kernels that the backend has no implementation of: plain torch serves them. The number is that of the "
              "engine's starts; empty if there are none.", "bargauge", 6),
        Panel("CPU kernels", {
            "{{instance}}: {{isa}}, bfloat16 by {{gemm}}, {{weights}} weights": of("cpu_kernels_info")}, "short",
            "What the CPU kernels run on; empty on other devices.", "bargauge", 12),
        Panel("CPU rates", {"{{instance}}: {{numbers}} on {{isa}}": of("cpu_peak_flops")}, "flops",
              "Operations a second of one thread, as measured at the start.", "bargauge", 12),
        Panel("Mean by kernel", {"{{kernel}} {{phase}}": mean(LATENCY, *EACH)}, "s",
              "Mean latency of a call.", width=12),
        Panel("Calls timed", {"{{kernel}}": rate(f"{LATENCY}_count", "kernel", *PICKED)}, "ops",
              "Samples per second; one step in kernel_sampling is timed.", width=12, stack="normal"),
    ]),
    Row("Percentiles", [
        Panel("p50 by kernel", {"{{kernel}} {{phase}}": quantile(0.5, LATENCY, *EACH)}, "s",
              "Median latency of a call.", width=12),
        Panel("p99 by kernel", {"{{kernel}} {{phase}}": quantile(0.99, LATENCY, *EACH)}, "s",
              "The slowest calls.", width=12),
        Panel("p99 drift", {"{{kernel}} {{phase}}": (
            f"{quantile(0.99, LATENCY, *EACH, over=LAST)} / {quantile(0.99, LATENCY, *EACH, over=BEFORE)}")}, "none",
            "p99 of the last $baseline over that of the $baseline before it; 1 is no change. Buckets are wide: a "
            "step to 2.5 may be a bound that was just crossed, which the mean beside it tells.",
            width=12, thresholds={GREEN: 0, ORANGE: 1.5, RED: 2.6}),
        Panel("Mean drift", {"{{kernel}} {{phase}}": (
            f"({mean(LATENCY, *EACH, over=LAST)}) / ({mean(LATENCY, *EACH, over=BEFORE)})")}, "none",
            "Mean of the last $baseline over that of the $baseline before it: exact, but larger batches and longer "
            "contexts raise it too.", width=12, thresholds={GREEN: 0, ORANGE: 1.5, RED: 2}),
    ]),
    Row("Steps", [
        Panel("Steps", {"{{phase}} {{mode}}": rate("step_seconds_count", "phase, mode")}, "ops",
              "Steps per second. decode: only rows of one token; prefill: only chunks; mixed: both. captured: the "
              "decoder was one dispatch, at least for its decode rows.", stack="normal"),
        Panel("Share of time", {"{{phase}}": rate("step_seconds_sum", "phase")}, "s",
              "Seconds of each kind of step, per second: how the time is divided.", stack="percent"),
        Panel("Decode tokens by mode", {"{{mode}}": rate("decode_tokens_total", "mode")}, "tokens/s",
              "Tokens of decode rows by how they were computed. Eager ones cost a launch for each kernel.",
              stack="normal"),
        Panel("Step time p50", {"{{phase}}": quantile(0.5, "step_seconds", "phase")}, "s",
              "From a step's launch, or the end of the one before it where that is later, to its result."),
        Panel("Step time p99", {"{{phase}}": quantile(0.99, "step_seconds", "phase")}, "s", "As above, the slowest."),
        Panel("Decode step, spread", {"{{le}}": rate("step_seconds_bucket", "le", DECODE)}, "s",
              "Steps of decode rows alone, by their time.", "heatmap"),
    ]),
    Row("Batch", [
        Panel("Decode batch", {
            "p50": quantile(0.5, "step_tokens", "", DECODE), "p95": quantile(0.95, "step_tokens", "", DECODE),
            "mean": mean("step_tokens", "", DECODE)}, "short",
            "Rows of the steps that only decode, each one request."),
        Panel("Tokens a step", {"{{phase}}": mean("step_tokens", "phase")}, "short",
              "Mean tokens computed in a step; chunks fill it up to max_num_batched_tokens."),
    ]),
    Row("Host and device", [
        Panel("Host gap", quantiles("step_host_gap_seconds", 0.5, 0.95, 0.99), "s",
              "The device with nothing to do between two steps, waiting for the host; 0 where steps overlap."),
        Panel("Idle for the host", {"share of the time": share(
            rate("step_host_gap_seconds_sum"), f"{rate('step_host_gap_seconds_sum')} + {rate('step_seconds_sum')}")},
            "percentunit", "Share of the steps' time that the device waited for the host.",
            thresholds={GREEN: 0, ORANGE: 0.05, RED: 0.15}),
        Panel("Lag of lengths", quantiles("lengths_lag_seconds", 0.5, 0.99), "s",
              "Launch of a captured step until its lengths are updated by another thread, on Ascend. The device waits "
              "for a long one."),
        Panel("Cancel to free", quantiles("cancel_to_free_seconds", 0.5, 0.99), "s",
              "From a cancel's arrival until its blocks are free."),
    ]),
    Row("Spread of $kernel", [
        Panel("$kernel", {"{{le}}": rate(f"{LATENCY}_bucket", "le", *PICKED)}, "s",
              "All timed calls of this kernel by their latency.", "heatmap", repeat="kernel"),
    ]),
], [
    {"type": "query", "name": "kernel", "label": "Kernel", "of": f"label_values({of(f'{LATENCY}_count')}, kernel)"},
    {"type": "query", "name": "phase", "label": "Phase", "of": f"label_values({of(f'{LATENCY}_count')}, phase)"},
    {"type": "interval", "name": "baseline", "label": "Drift over", "values": ["1d", "1h", "6h", "7d", "15m"]},
])

ALERTS = Path(__file__).parent / "npuserve/rules/npuserve.yaml"
RUNBOOKS_PAGE = Path(__file__).parents[1] / "docs/operations.md"


def runbook(alert: str) -> Panel:
    """Return the section on an alert of docs/operations.md as a panel of text. Links are reduced to their text."""
    page = RUNBOOKS_PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^### {alert}\n\n(.*?)\n(?=##)", page, re.MULTILINE | re.DOTALL)
    if not section:
        raise SystemExit(f"{RUNBOOKS_PAGE}: no section {alert}")
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", section[1])
    return Panel(alert, {}, "", "From docs/operations.md.", "text", 12, 10, text=text)


RUNBOOKS = Dashboard(
    "npuserve-runbooks", "npuserve / Runbooks", "What each alert means, and what to do.",
    [Row("", [runbook(alert) for alert in re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8"))])])
"""Its panels have the numbers of the alerts, by which the chart links to them."""

# Each file has its dashboard's uid as its name: Grafana's sidecar puts the files of all charts into one folder.
DASHBOARDS = {dashboard.uid: dashboard for dashboard in (OPERATORS, KERNELS, RUNBOOKS)}


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    stale = []
    for name, dashboard in DASHBOARDS.items():
        file = FOLDER / f"{name}.json"
        text = json.dumps(dashboard_json(dashboard), separators=(",", ":"), ensure_ascii=False) + "\n"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
            if not check:
                file.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}; run python helm/dashboards.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
