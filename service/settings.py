"""Sources of the configuration: flags, then NPUSERVE_* variables, then a TOML file, then ServerConfig's defaults.

One table, `SETTINGS`, defines all of them. Every error names its source: the flag, the variable, or the file and its
key.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from npuserve.service.arguments import did_you_mean
from npuserve.service.config import RANGES, ConfigError, ServerConfig
from npuserve.service.equivalents import VALUES, setting_for
from npuserve.service.toml_file import read_toml

PREFIX = "NPUSERVE_"
LISTED = "; docs/configuration.md lists them"

# Fields of ServerConfig by what a user wants to do, in the order of --help. The last group is for developers and for
# unusual loads.
SETTINGS: dict[str, dict[str, str]] = {
    "choose the model": {
        "model": "folder or hub name; none: the built-in model",
        "served_name": "model name for clients; none: the folder's name",
        "max_model_len": "maximum tokens of prompt and answer together; 0: the model's limit",
        "dtype": "type of weights and activations; auto follows the checkpoint and the device",
        "lm_head_dtype": "type of the LM head and a tied embedding; int8: quantized when loaded; auto: the model's",
        "task": "auto: what modules.json of the model's folder says, without it text; rank: the model is a reranker",
    },
    "choose the device": {
        "device": "device of the model; auto takes the first available of npu, cuda, cpu",
        "tensor_parallel_size": "ranks that share the model, a process each, on GPUs and NPUs with a device each",
        "expert_parallel": "each rank has whole experts of a mixture; otherwise a part of each expert",
        "threads": "CPU threads of the engine, or of each rank; 0: one per core",
        "prefill_device": "device of prefill: same as the model's, or the host's cpu",
    },
    "reach the server": {
        "host": "address on which gRPC and metrics listen",
        "port": "port of gRPC; 0: a free one",
        "metrics_host": "address on which metrics listen; none: host",
        "metrics_port": "port of /metrics; 0: a free one",
        "health_port": "port of health checks without TLS, for probes that do not support TLS; 0: none",
        "openai_port": "port of the OpenAI API over HTTP, by smg (pip install 'npuserve[gateway]'); 0: none",
        "frontends": "front-end processes, which share the port, tokenize and stream",
        "max_connections": "maximum open connections per front end; above it, idle ones are closed for new ones",
        "max_message_size": "maximum size of a request, in bytes or as 4MiB; 0: what a request of this model can need",
    },
    "trade memory, throughput and latency": {
        "max_num_seqs": "maximum requests in a batch; capped by max_num_batched_tokens",
        "max_num_batched_tokens": "maximum tokens in a step: the budget of chunked prefill",
        "kv_cache_memory": "size of the KV cache, in bytes or as 4GiB; 0: derived from the free memory",
        "kv_cache_dtype": "type of the KV cache; auto: that of the activations; int8, fp8: twice the tokens in the "
                          "same memory; fp8 on CUDA",
        "state_dtype": "type of the states of linear attention; auto: float32, the only one on a CPU, and "
                       "bfloat16 on an NPU",
        "block_size": "tokens per block of the KV cache, a power of two; 0: the backend's choice",
        "capture": "capture steps as graphs; auto: kernel by kernel if that fails; on: failing is an error; decoder: "
                   "as auto, without the sampler; off: never",
        "speculate": "compute drafts of answers, which stay the same: off; auto: where it is faster; suffix: from "
                     "earlier text; mtp: of the model's head; or the folder of a model or EAGLE-3 head",
        "draft_depth": "most tokens that a head or a smaller model drafts at a time",
        "stream_interval": "tokens per stream message, except the first and last message",
    },
    "share the server between clients": {
        "max_queue": "maximum waiting requests; more are refused",
        "max_requests_per_client": "maximum requests at once per client (API key, certificate or address); 0: no limit",
        "min_priority": "lowest priority value that a request may have, unless its API key sets one; lower is earlier",
        "max_priority": "highest priority value that a request may have, unless its API key sets one",
        "slow_reader_seconds": "time after which a stream is cancelled if its client reads nothing",
        "plain_content": "default for chats: special tokens in message text are plain text",
    },
    "reuse prefixes": {
        "prefix_cache": "reuse the blocks of equal prefixes",
        "kv_offload_memory": "host memory for prefixes that the KV cache evicts, in bytes or as 64GiB; 0: none",
        "kv_store": "HOST:PORT of the master of a Mooncake store, by which servers share prefixes; none: no store; "
                    "needs kv_offload_memory, kv_store_secret and pip install 'npuserve[store]'",
        "kv_store_secret": "file of the secret of the servers that share prefixes, at least 32 bytes",
        "kv_store_memory": "host memory that this server lends to the store, in bytes or as 16GiB; 0: none",
        "kv_store_timeout_seconds": "time after which a call of the store is given up, and prompts are computed",
        "share_prefix_cache": "scope of shared prefixes: one tenant (API key or client certificate), or all; with "
                              "all, callers can probe what others have sent",
        "kv_events": "publish changes of the prefix cache, with token ids: over gRPC (SubscribeKvEvents), or over "
                     "ZeroMQ too; needs pip install 'npuserve[gateway]'",
        "kv_events_endpoint": "ZeroMQ address of KV events; bound if its host is *, else connected to",
        "kv_events_replay_endpoint": "ZeroMQ address that replays kept KV events; none: no replays",
    },
    "stop, restart and resume": {
        "drain_seconds": "grace period of running requests after SIGTERM",
        "resume_seconds": "time for which a stream can be resumed after its end or a lost connection; 0: never",
        "hang_seconds": "time without a heartbeat after which a process is killed and restarted",
    },
    "secure the server": {
        "tls_cert": "PEM file of the server's certificate chain; none: no TLS",
        "tls_key": "PEM file of the certificate's key",
        "tls_client_ca": "PEM file of the CAs that sign client certificates; none: clients need no certificate",
        "api_keys": "file of API keys, written by npuserve keys; none: clients need no key",
        "openai_api_keys": "file of lines NAME:KEY, the keys of HTTP clients; none: they need no key",
        "admin_certificates": "comma-separated names of client certificates that may call AdminService",
    },
    "watch the server": {
        "log_format": "auto: text on a terminal, JSON otherwise",
        "log_level": "minimum level of log lines",
        "log_prompts": "log the prompt of each request",
        "metrics_vllm_aliases": "export metrics under vLLM's names too",
        "target_ttft_seconds": "maximum time to first token of an answer that counts as goodput",
        "target_itl_seconds": "target of the gap between tokens: prompts beside streams keep it, and answers whose "
                              "mean is larger are no goodput",
        "otlp_endpoint": "OTLP endpoint of traces, as http://host:4317 (pip install 'npuserve[otel]'); none: no traces",
        "profile_dir": "folder for traces of profiles (npuserve profile); none: profiles are refused",
    },
    "advanced": {
        "emulate": "run the device's code on an emulated device: checks calls and numbers, not speed",
        "emulate_relax": "what the emulated device accepts beyond the real one, as a list of fp32, small_heads",
        "decode_buckets": "row counts of captured decode steps, as in 1,2,4,8, on devices with graphs; none: automatic",
        "capture_chunks": "capture steps with chunks of prompts too, up to 512 tokens, on devices with graphs",
        "double_buffering": "launch a step before the tokens of the previous step are on the host",
        "cpu_gemm": "bfloat16 GEMM on the CPU: amx or bf16 instructions, or fma after widening to fp32; auto: measured",
        "cpu_weights": "bfloat16 weights on the CPU: compact is 12.25 bits per weight; auto: the faster measured",
        "cpu_binding": "bind the engine's threads to processors near the device, where that is known; off: never",
        "kernel_sampling": "time each kernel on every N-th step; 0: never",
        "priority_aging_seconds": "waiting time that raises a request by one priority level",
        "max_preparing": "maximum requests waiting to be tokenized, per front end and size class",
        "max_refusals_per_second": "maximum refusals per second of an address, per front end; more wait; 0: no limit",
        "max_buffered_tokens": "unread tokens of a stream at which its request pauses",
        "kv_events_buffer": "number of batches of KV events that are kept for subscribers that missed them",
        "load_seconds": "time after which a reloading engine is killed; 0: 3 times the first load, at least 60 s",
        "max_connection_age_seconds": "age after which a client must reconnect for further calls; 0: no limit",
        "debuggable": "allow core files and debuggers, which expose prompts",
    },
}

CHOSEN_BY_PRIVATE_SERVER = (
    "host", "port", "metrics_port", "health_port", "tls_cert", "tls_key", "tls_client_ca", "api_keys",
    "admin_certificates")
"""Settings that `npuserve serve --private` chooses."""

_FIELDS = {f.name: f for f in msgspec.structs.fields(ServerConfig)}
_SIZES = {"kv_cache_memory", "kv_offload_memory", "kv_store_memory", "max_message_size"}
_METAVARS = {
    "MODEL": ("model",),
    "NAME": ("served_name",),
    "NAME,...": ("admin_certificates",),
    "HOST": ("host", "metrics_host"),
    "PORT": ("port", "metrics_port", "health_port", "openai_port"),
    "URL": ("otlp_endpoint", "kv_events_endpoint", "kv_events_replay_endpoint"),
    "FILE": ("tls_cert", "tls_key", "tls_client_ca", "api_keys", "openai_api_keys", "kv_store_secret"),
    "HOST:PORT": ("kv_store",),
    "FOLDER": ("profile_dir",),
    "MODE": ("speculate",),
    "SIZE": tuple(_SIZES),
    "TOKENS": ("max_model_len", "max_num_batched_tokens", "block_size", "stream_interval", "max_buffered_tokens"),
    "ROWS,...": ("decode_buckets",),
    "WORD,...": ("emulate_relax",),
}
"""What stands for a setting's value in --help: the settings that need another word than their type's."""
_SIZE = re.compile(r"(\d{1,1000}(?:\.\d+)?)\s*(?:([KMGT])(iB?|B)?|B)?", re.IGNORECASE)
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# Variables that Kubernetes sets in every container for a service named npuserve or npuserve-something.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    return PREFIX + name.upper()


def add_arguments(parser: argparse._ActionsContainer, leave_out: Collection[str] = ()) -> None:
    """Add a flag for every setting, and --config. An absent flag adds nothing to the namespace.

    parser: gets a group of arguments for each title; a group, which can have none, gets the arguments themselves.
    leave_out: settings without a flag.
    """
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS,
                        help=f"a TOML file of settings ({PREFIX}CONFIG)")
    for title, settings in SETTINGS.items():
        group = parser.add_argument_group(title) if isinstance(parser, argparse.ArgumentParser) else parser
        for name, text in settings.items():
            if name in leave_out:
                continue
            kind = _FIELDS[name].type
            default = _FIELDS[name].default
            help_text = text if default == "" else f"{text} (default: {_show(default)})"
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["metavar"] = _metavar(name)
            if name == "model":
                options["nargs"] = "?"
            group.add_argument(name if name == "model" else flag(name), **options)


def load(args: argparse.Namespace, environ: Mapping[str, str], *, is_private: bool = False) -> ServerConfig:
    """Return the resulting configuration. Raises ConfigError, which names the source.

    args: namespace of a parser prepared by `add_arguments`.
    is_private: for a private server. Flags and keys of the file are refused if it chooses their settings; variables,
        which may be meant for other servers, are ignored.
    """
    if is_private:
        chosen = {variable(name) for name in CHOSEN_BY_PRIVATE_SERVER}
        environ = {name: value for name, value in environ.items() if name not in chosen}
    path = getattr(args, "config", None) or environ.get(f"{PREFIX}CONFIG")
    given: dict[str, tuple[str, Any]] = {}
    for source in (_from_file(Path(path)) if path else iter(()), _from_variables(environ), _from_flags(args)):
        for name, label, value in source:
            if is_private and name in CHOSEN_BY_PRIVATE_SERVER:
                raise ConfigError(f"{label}: a private server chooses it; remove it")
            given[name] = label, _parse(name, label, value)
    try:
        return ServerConfig(**{name: value for name, (_, value) in given.items()})
    except ConfigError as error:
        labels = {name: label for name, (label, _) in given.items()}
        raise ConfigError(f"{error}{_sources(str(error), labels)}") from None


def _sources(message: str, labels: Mapping[str, str]) -> str:
    """Return the end of an error message: the sources of the setting that it begins with, else of those it contradicts.

    labels: source of each setting that was given.
    """
    name = message.partition(":")[0]
    named = [name] if name in labels else [word for word in labels if re.search(rf"\b{word}\b", message)]
    return f" (from {', '.join(labels[word] for word in named)})" if named else ""


def parse_size(text: str) -> int:
    """Return a size in bytes. K, M, G, T and KiB, ... are powers of 1024; KB, ... are powers of 1000. Raises
    ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 4GiB, 512M or a number of bytes")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    size = Decimal(number) * base ** (" KMGT".index(unit.upper()) if unit else 0)
    if 0 < size < 1:  # 0 would mean the default
        raise ValueError(f"{text!r} is not a size: it is less than a byte")
    return int(size)


def _from_file(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, label, value) for each key of the file. Raises ConfigError."""
    try:
        table = read_toml(str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    for name, value in table.items():
        if name not in _FIELDS:
            hint = did_you_mean(name, _FIELDS, otherwise=LISTED)
            if isinstance(value, dict):
                hint = f"; settings stand in no table: remove the line [{name}]"
            elif instead := setting_for(name, str):
                hint = instead
            raise ConfigError(f"{path}: {name}: no such setting{hint}")
        yield name, f"{path}:{name}", value


def _from_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, label, value) for each NPUSERVE_* variable. Raises ConfigError. Empty variables are ignored."""
    for key, value in environ.items():
        rest = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or not value or rest == "CONFIG" or rest.startswith("TEST_"):
            continue
        is_link = re.match(r"(tcp|udp|sctp)://", value) and not rest.endswith("_ENDPOINT")
        if _SERVICE_LINK.fullmatch(rest) or is_link:
            continue
        if rest.lower() not in _FIELDS or rest != rest.upper():
            hint = setting_for(rest, variable) or did_you_mean(
                rest.upper(), map(str.upper, _FIELDS), prefix=PREFIX, otherwise=LISTED)
            raise ConfigError(f"{key}: no such setting{hint}")
        yield rest.lower(), key, value


def _from_flags(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, label, value) for each flag that was given. Raises ConfigError for a switch's value as MODEL."""
    for name in _FIELDS:
        value = getattr(args, name, None)
        if name == "model" and value in _BOOLEANS and not Path(value).is_dir():
            raise ConfigError(f"MODEL: {value!r} is no model. A switch takes no value: write --x to turn it on and "
                              "--no-x to turn it off")
        if value is not None:
            yield name, flag(name), value


def _parse(name: str, label: str, value: Any) -> Any:
    """Convert text (flags, variables) or a TOML value to the setting's type. Raises ConfigError."""
    kind = _FIELDS[name].type
    is_text = isinstance(value, str)
    if is_text and "\0" in value:  # in a file; no path, host or name can have one
        raise ConfigError(f"{name}: {value!r} has a null character (from {label})")
    try:
        if is_text:
            value.encode()  # raises if a variable is not UTF-8: Python then has lone surrogates
        if is_text and name in _SIZES:
            return parse_size(value)
        if is_text and kind is bool:
            return _BOOLEANS[value.lower()]
        return msgspec.convert(value.strip() if kind in (int, float) and is_text else value, kind, strict=not is_text)
    except (ValueError, KeyError, msgspec.ValidationError):
        wanted = f"{_wanted(name, is_text)} (from {label}){_near(name, value)}"
        raise ConfigError(f"{name}: {value!r} is not {wanted}") from None


def _wanted(name: str, is_text: bool) -> str:
    kind = _FIELDS[name].type
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if name in _SIZES:
        return "a size such as 4GiB"
    within = "" if name not in RANGES else " in [{}, {}]".format(*RANGES[name])
    return {bool: "true or false", int: f"a whole number{within}", float: f"a number{within}",
            str: "UTF-8" if is_text else "text"}[kind]


def _near(name: str, value: Any) -> str:
    """Return the end of a sentence that suggests one of a setting's values, if any is near."""
    kind = _FIELDS[name].type
    if get_origin(kind) is not Literal or not isinstance(value, str):
        return ""
    same = VALUES.get(name, {}).get(value.lower())
    return f"; did you mean {same}?" if same else did_you_mean(value.lower(), get_args(kind))


def _show(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _metavar(name: str) -> str:
    kind = _FIELDS[name].type
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    for metavar, names in _METAVARS.items():
        if name in names:
            return metavar
    return {bool: "", int: "N", float: "SECONDS"}[kind]
