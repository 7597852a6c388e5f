"""Where the configuration comes from: flags, then NPUSERVE_* variables, then a TOML file, then ServerConfig's defaults.

One table, `SETTINGS`, makes all three. Every error names the place it came from: the flag, the variable, or the
file and its key.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from npuserve.service.arguments import did_you_mean
from npuserve.service.config import ConfigError, ServerConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "NPUSERVE_"
LISTED = "; docs/configuration.md lists them"

# ServerConfig's fields, by group and in the order of --help.
SETTINGS: dict[str, dict[str, str]] = {
    "model": {
        "model": "a folder or a hub name; none: the built-in model",
        "served_name": "the name that clients may ask for; none: the folder's",
        "device": "where the model runs; auto takes the first present of npu, cuda, cpu",
        "emulate": "run the device's own code on an emulated device: proves calls and numbers, not speed",
        "emulate_relax": "what the emulated device accepts beyond the real one: fp32, small_heads",
        "dtype": "of weights and activations; auto follows the checkpoint and the device",
        "lm_head_dtype": "of the LM head and an embedding tied to it; int8: rounded as it is loaded; auto: the model's",
        "max_model_len": "tokens of prompt and answer together; 0: the model's own",
    },
    "network": {
        "host": "address to listen on, of gRPC and metrics",
        "port": "of gRPC; 0: a free one",
        "metrics_host": "address to listen on, of metrics; none: host",
        "metrics_port": "of /metrics; 0: a free one",
        "frontends": "processes that share the port, tokenize and stream",
        "max_connections": "open connections of each front end; more are closed at once",
        "max_message_size": "bytes of a request, or a size such as 4MiB; 0: what a request of this model can need",
        "max_connection_age_seconds": "after which a client connects anew for its next calls; 0: never",
        "drain_seconds": "how long running requests may still take after SIGTERM",
        "resume_seconds": "how long a stream can be resumed after its end or its client's loss; 0: not at all",
        "state_folder": "where streams that a stop cut off are kept for the next start; none: nowhere",
        "hang_seconds": "a process that does nothing for so long is killed and started again",
        "load_seconds": "an engine that loads again for so long is killed; 0: 3 times the first load, at least 60 s",
        "health_port": "of health alone, without TLS, for probes that speak none; 0: none",
    },
    "batching": {
        "max_num_seqs": "requests computed at once; no more than max_num_batched_tokens take effect",
        "max_num_batched_tokens": "tokens computed in one step: the budget that cuts prompts into chunks",
        "decode_buckets": "rows of captured decode steps, as in 1,2,4,8, on devices with graphs; none: its choice",
        "max_queue": "requests that may wait; more are refused",
        "max_requests_per_client": "requests that a client may have at once, by API key or address; 0: no limit",
        "max_preparing": "requests of a front end that may wait to be tokenized, small and large ones each",
        "max_refusals_per_second": "calls of an address that a front end refuses in a second; more wait; 0: no limit",
        "max_buffered_tokens": "tokens that a slow reader leaves unread before its request pauses",
        "slow_reader_seconds": "after which a stream whose reader takes nothing is cancelled",
        "stream_interval": "tokens to a message of a stream, but for the first and the last ones",
        "priority_aging_seconds": "seconds of waiting that count as one step of priority",
        "min_priority": "lowest priority that a request may have, where its API key has no own; lower is earlier",
        "max_priority": "highest priority that a request may have, where its API key has no own",
        "double_buffering": "launch a step before the last one's tokens are on the host",
        "prefill_device": "where prompts are computed: on the device or on the host's cpu",
    },
    "KV cache": {
        "block_size": "tokens a block, a power of two; 0: the backend's choice",
        "kv_cache_dtype": "auto: that of the activations; int8: twice the tokens in the same memory",
        "kv_cache_memory": "bytes, or a size such as 4GiB; 0: what is free, within reason",
        "prefix_cache": "share the blocks of equal prefixes",
        "share_prefix_cache": "share them between API keys and client certificates too, which lets callers find out "
                              "what others have sent",
    },
    "machine": {
        "threads": "CPU threads of the engine; 0: as many as there are cores",
        "cpu_gemm": "how the CPU multiplies bfloat16: amx and bf16 by its instructions, fp32 widened; auto: measured",
        "cpu_weights": "how the CPU holds bfloat16 weights: compact is 12.25 bits a number; auto: measured",
        "tensor_parallel_size": "devices that share the model; above 1 is reserved",
        "kernel_sampling": "every how many steps each kernel is timed; 0: never",
    },
    "metrics and traces": {
        "metrics_vllm_aliases": "show metrics under vLLM's names too",
        "target_ttft_seconds": "time to first token that an answer must keep to count as goodput",
        "target_itl_seconds": "mean gap between tokens that an answer must keep to count as goodput",
        "otlp_endpoint": "where traces go, as http://host:4317 (pip install 'npuserve[otel]'); none: no traces",
    },
    "logs": {
        "log_format": "auto: text on a terminal, JSON otherwise",
        "log_level": "the least that is logged",
        "log_prompts": "log the prompt of each request",
        "debuggable": "allow core files and debuggers, which show prompts",
    },
    "security": {
        "tls_cert": "PEM file of the server's certificate and its chain; none: no TLS",
        "tls_key": "PEM file of the certificate's key",
        "tls_client_ca": "PEM file of the authorities that clients' certificates must come from; none: no matter",
        "api_keys": "file of the keys that clients may use, made by npuserve keys; none: none is asked for",
        "admin_certificates": "names of the client certificates that may call AdminService, with commas",
        "chat_special_tokens": "read the text of special tokens in chats as those tokens, where a request says nothing",
    },
}

_FIELDS = {f.name: f for f in msgspec.structs.fields(ServerConfig)}
_SIZES = {"kv_cache_memory", "max_message_size"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB?|B)?|B)?", re.IGNORECASE)
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# What Kubernetes sets in every container for a service named npuserve or npuserve-something.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    return PREFIX + name.upper()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting, and --config. Absent flags leave nothing in the namespace."""
    parser.add_argument("--config", metavar="FILE", help=f"a TOML file of settings ({PREFIX}CONFIG)")
    for title, settings in SETTINGS.items():
        group = parser.add_argument_group(title)
        for name, text in settings.items():
            kind, default = _FIELDS[name].type, _FIELDS[name].default
            help_text = text if default == "" else f"{text} (default: {_show(default)})"
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif name == "model":
                options["nargs"] = "?"
            options |= {} if kind is bool else {"metavar": _metavar(name)}
            group.add_argument(name if name == "model" else flag(name), **options)


def load(args: argparse.Namespace, environ: Mapping[str, str]) -> ServerConfig:
    """The configuration in force. args: parsed by `add_arguments`. Raises ConfigError, which names the source."""
    path = getattr(args, "config", None) or environ.get(f"{PREFIX}CONFIG")
    found: dict[str, tuple[str, Any]] = {}
    for source in (_from_file(Path(path)) if path else iter(()), _from_variables(environ), _from_flags(args)):
        for name, label, value in source:
            found[name] = label, _parse(name, label, value)
    try:
        return ServerConfig(**{name: value for name, (_, value) in found.items()})
    except ConfigError as error:
        name = str(error).partition(":")[0]
        raise ConfigError(f"{error} (from {found[name][0]})" if name in found else str(error)) from None


def parse_size(text: str) -> int:
    """Bytes. K, M, G, T and KiB, ... are powers of 1024; KB, ... are powers of 1000. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 4GiB, 512M or a number of bytes")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(Decimal(number) * base ** (" KMGT".index(unit.upper()) if unit else 0))


def _from_file(path: Path) -> Iterator[tuple[str, str, Any]]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for name, value in table.items():
        if name not in _FIELDS:
            raise ConfigError(f"{path}: {name}: no such setting{did_you_mean(name, _FIELDS, otherwise=LISTED)}")
        yield name, f"{path}:{name}", value


def _from_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """An empty variable counts as absent."""
    for key, value in environ.items():
        rest = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or not value or rest == "CONFIG" or rest.startswith("TEST_"):
            continue
        if _SERVICE_LINK.fullmatch(rest) or re.match(r"(tcp|udp|sctp)://", value):
            continue
        if rest.lower() not in _FIELDS or rest != rest.upper():
            hint = did_you_mean(rest.upper(), map(str.upper, _FIELDS), prefix=PREFIX, otherwise=LISTED)
            raise ConfigError(f"{key}: no such setting{hint}")
        yield rest.lower(), key, value


def _from_flags(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    for name in _FIELDS:
        if getattr(args, name, None) is not None:
            yield name, flag(name), getattr(args, name)


def _parse(name: str, label: str, value: Any) -> Any:
    """A value of the setting's type from text (flags, variables) or from TOML's own types."""
    kind = _FIELDS[name].type
    wanted: str
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        wanted = "one of " + ", ".join(get_args(kind))
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        wanted = "true or false"
    elif kind is str:
        if isinstance(value, str) and _is_utf8(value):
            return value
        wanted = "UTF-8" if isinstance(value, str) else "text"
    else:
        wanted = "a number" if kind is float else "a size such as 4GiB" if name in _SIZES else "a whole number"
        if isinstance(value, str):
            try:
                return parse_size(value) if name in _SIZES else kind(value)
            except ValueError:
                pass
        elif isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool):
            return kind(value)
    raise ConfigError(f"{name}: {value!r} is not {wanted} (from {label})")


def _is_utf8(text: str) -> bool:
    """False where a variable's bytes were no UTF-8: Python keeps them as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _metavar(name: str) -> str:
    kind = _FIELDS[name].type
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if name in _SIZES:
        return "SIZE"
    return {int: "N", float: "SECONDS", str: "MODEL" if name == "model" else "TEXT"}[kind]
