"""Flags of other servers, of their clients and of earlier versions, and what to write here in their place.

`SERVERS` is the source of the tables in docs/configuration.md. `{name}` stands for a setting, which an error names as
its source does: a flag, a variable, or a key of a file.
"""

from __future__ import annotations

from collections.abc import Callable

HTTP = "none: the server speaks gRPC; a gateway in front of it serves HTTP, see docs/gateway.md"
PARSERS = "none: parse_output of a request; the model's chat template decides the format"
ALWAYS = "none: always on"
MODEL = "{model} without a flag: npuserve serve MODEL"
QUANTIZATION = (
    "none: config.json says it. W8A8, W4A16 (compressed-tensors, AWQ, GPTQ) and ModelSlim (W8A8, W4A8) are "
    "served, on GPUs also float8, on CPUs also W4A8; npuserve quantize makes W8A8, W4A16 and W4A8")
REPLICAS = "none: start several servers, replicas, behind a gateway, see docs/gateway.md"

# Flags that stand in one row of a table, and the answer.
VLLM: dict[tuple[str, ...], str] = {
    ("--model",): MODEL,
    ("--gpu-memory-utilization", "--kv-cache-memory-bytes"): (
        "{kv_cache_memory}: the size of the cache alone. 0, the default, takes what a measured step leaves on GPUs, "
        "and nine tenths of the free memory on NPUs"),
    ("--served-model-name",): "{served_name}, one name",
    ("--enable-chunked-prefill", "--scheduling-policy"): (
        "none: prompts are always computed in chunks; clients always take turns, then by priority"),
    ("--enforce-eager",): "{capture} off",
    ("--cudagraph-capture-sizes",): "{decode_buckets}",
    ("--enable-prefix-caching", "--no-enable-prefix-caching"): (
        "{prefix_cache}, on by default; --no-prefix-cache turns it off. Without {share_prefix_cache} all, tenants do "
        "not share prefixes"),
    ("--generation-config", "--override-generation-config"): (
        "none: edit the model's generation_config.json. max_new_tokens in it is not read"),
    ("--hf-overrides", "--rope-scaling"): (
        "none: edit config.json. rope_scaling of the type yarn, as in Qwen3's model cards, extends the context to "
        "131,072 tokens"),
    ("--chat-template",): (
        "none: edit the model folder's chat_template.jinja, else the template in tokenizer_config.json"),
    ("--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"): PARSERS,
    ("--tokenizer", "--tokenizer-mode"): "none: the tokenizer in the model's folder is used",
    ("--quantization",): QUANTIZATION,
    ("--trust-remote-code",): "none: code of a checkpoint is never run",
    ("--load-format",): "none: weights are read from safetensors alone",
    ("--download-dir",): "none: the variable HF_HOME",
    ("--revision",): "none: serve a folder of that revision. In the chart model.hub.revision",
    ("--api-key",): "{api_keys}: a file of keys, which npuserve keys add FILE NAME writes",
    ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"): "{tls_cert}, {tls_key}, {tls_client_ca}",
    ("--enable-log-requests", "--disable-log-requests", "--disable-uvicorn-access-log", "--uvicorn-log-level"): (
        "{log_level}: warning leaves the requests' lines out. {log_prompts} adds prompts"),
    ("--otlp-traces-endpoint",): "{otlp_endpoint}",
    ("--seed",): "none: seed of a request",
    ("--allowed-origins", "--root-path", "--response-role"): HTTP,
    ("--data-parallel-size",): REPLICAS,
    ("--enable-lora", "--lora-modules"): (
        "none: merge the adapter into its model (merge_and_unload and save_pretrained of peft) and serve that folder"),
    ("--limit-mm-per-prompt",): "none: models of text alone are served",
    ("--speculative-config",): (
        "{speculate}: suffix for ngram and suffix, mtp for mtp, a folder for a draft model or an eagle3 head, or auto. "
        "{draft_depth} is num_speculative_tokens"),
    ("--pipeline-parallel-size", "--enable-sleep-mode", "--cpu-offload-gb", "--swap-space"): "none: not supported",
    ("--kv-transfer-config",): "{kv_store}: a Mooncake store that servers share; other connectors are not supported",
    ("--enable-expert-parallel",): "{expert_parallel}",
    ("--kv-offloading-size",): "{kv_offload_memory}: with a unit, as 64GiB",
}
OTHERS: dict[tuple[str, ...], str] = {
    ("--model-id", "--model-path", "--hf-repo", "-m", "-hf"): MODEL,
    ("--max-total-tokens", "--context-length", "--ctx-size", "-c"): "{max_model_len}",
    ("--max-input-length", "--max-input-tokens"): (
        "{max_model_len}: tokens of prompt and answer together; a prompt has no limit of its own"),
    ("--max-running-requests", "--parallel", "-np"): "{max_num_seqs}",
    ("--max-concurrent-requests",): "{max_num_seqs}, computed at once, and {max_queue}, waiting",
    ("--max-batch-prefill-tokens", "--chunked-prefill-size", "--batch-size", "-b"): "{max_num_batched_tokens}",
    ("--mem-fraction-static", "--cuda-memory-fraction"): "{kv_cache_memory}: the size of the cache alone",
    ("--tp", "--tp-size", "--num-shard"): "{tensor_parallel_size}",
    ("--dp", "--dp-size"): REPLICAS,
    ("--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio"): (
        "{kv_offload_memory}: a size with a unit, as 64GiB"),
    ("--disable-radix-cache",): "--no-prefix-cache",
    ("--disable-cuda-graph",): "{capture} off",
    ("--quantize",): QUANTIZATION,
    ("--n-gpu-layers", "--gpu-layers", "-ngl"): "{device}: the whole model runs on it",
    ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"): "{kv_cache_dtype}",
    ("--flash-attn", "-fa", "--cont-batching", "-cb", "--jinja"): ALWAYS,
    ("--mlock", "--no-mmap"): "none: weights are read into memory",
    ("-t",): "{threads}",
}
SERVERS = VLLM | OTHERS
REMOVED: dict[tuple[str, ...], str] = {
    ("--state-folder",): (
        "removed: a stream ends with its server. Leave the setting out; clients send such a request again"),
}
"""Settings of earlier versions."""

CLIENTS: dict[tuple[str, ...], str] = {
    ("--model", "-m"): "leave it out: a server has one model",
    ("--host", "--port", "--url", "--base-url", "--endpoint", "--server"): "--target HOST:PORT",
    ("--api-key", "--token"): "--api-key-file FILE: a file that holds the key",
    ("--max-new-tokens", "--max-completion-tokens", "--n-predict", "-n"): "--max-tokens N",
    ("--stream", "--no-stream"): "leave it out: answers are always streamed",
    ("--prompt", "-p"): "PROMPT without a flag: npuserve generate PROMPT",
    ("--file", "-f"): "- in place of PROMPT, and the file as stdin: npuserve generate - < FILE",
    ("--insecure", "-k", "--skip-verify"): (
        "--tls-ca FILE, the authority of the server's certificate; no option trusts any certificate"),
    ("--plaintext", "--no-tls"): "leave it out: without --tls and --tls-ca no TLS is used",
}
"""Flags of clients: of curl, grpcurl, vLLM's and TGI's benchmarks, llama-cli."""

VALUES = {
    "dtype": {"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32",
              "fp32": "float32", "f32": "float32"},
    "device": {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "q8_0": "int8"},
}
"""Values of settings by their names in other servers."""


def setting_for(name: str, show: Callable[[str], str]) -> str | None:
    """Return the end of a sentence: what to write in place of a flag, a key or a variable of another server or version.

    name: as on its command line, with dashes or underscores, or without a prefix.
    show: returns how a setting is to be named.
    """
    text = _find(SERVERS | REMOVED, name)
    return text and _ending(text.format_map(_Shown(show)))


def client_flag_for(name: str) -> str | None:
    """Return the end of a sentence: what to write in place of a flag of another client; None for an unknown one."""
    text = _find(CLIENTS, name)
    return text and _ending(text)


class _Shown(dict[str, str]):
    def __init__(self, show: Callable[[str], str]):
        super().__init__()
        self._show = show

    def __missing__(self, name: str) -> str:
        return self._show(name)


def _ending(text: str) -> str:
    if text.startswith(("leave it out", "removed: ")):
        return f"; {text}"
    if text.startswith("none: "):
        return f"; there is none here: {text.removeprefix('none: ')}"
    return f"; here it is {text}"


def _find(table: dict[tuple[str, ...], str], name: str) -> str | None:
    dashed = name.lower().replace("_", "-")
    flag = dashed if dashed.startswith("-") else f"--{dashed}"
    return next((text for flags, text in table.items() if flag in flags), None)
