"""Server configuration: frozen, complete and checked before anything is built.

The command line builds one `ServerConfig` (flags, then NPUSERVE_* variables, then a TOML file). Every process receives
it as JSON. Values discovered later, such as the size of the KV cache or the model's limits, are return values and never
written to it.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from npuserve.service.arguments import did_you_mean

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a gRPC message in either direction, for the server and for our clients."""
MAX_DRAIN_SECONDS = 86400
MAX_SAMPLES = 16
"""Maximum of GenerateRequest.n."""
MAX_CONSTRAINT_BYTES = 65536
"""Maximum size of a constraint: a schema, a regular expression, a grammar, a structural tag or all choices."""
PRIORITY_RANGE = (-100, 100)
"""Allowed range of a request's priority. Lower values run earlier."""
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535), "metrics_port": (0, 65535), "max_model_len": (0, 1 << 24), "block_size": (0, 1024),
    "kv_cache_memory": (0, 1 << 50), "kv_offload_memory": (0, 1 << 50),
    "kv_store_memory": (0, 1 << 50), "kv_store_timeout_seconds": (0.01, 60), "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_queue": (0, 1 << 20), "max_requests_per_client": (0, 1 << 20), "max_preparing": (1, 1 << 20),
    "max_refusals_per_second": (0, 1 << 20),
    "max_connections": (1, 1 << 20), "max_message_size": (0, MAX_MESSAGE_BYTES),
    "max_buffered_tokens": (1, 1 << 20),
    "slow_reader_seconds": (1, 86400), "stream_interval": (1, 1024),
    "draft_depth": (1, 7), "frontends": (1, 64), "tensor_parallel_size": (1, 64), "threads": (0, 1024),
    "priority_aging_seconds": (0.001, 1e6), "kernel_sampling": (0, 1 << 20),
    "min_priority": PRIORITY_RANGE, "max_priority": PRIORITY_RANGE,
    "drain_seconds": (0, MAX_DRAIN_SECONDS),
    "hang_seconds": (5, 86400), "load_seconds": (0, 86400), "resume_seconds": (0, 86400),
    "health_port": (0, 65535), "openai_port": (0, 65535), "kv_events_buffer": (64, 1 << 20),
    "max_connection_age_seconds": (0, 86400),
    "target_ttft_seconds": (0.001, 3600), "target_itl_seconds": (0.001, 3600),
}
"""Allowed range of each number among the settings."""

SPECULATE = "off", "auto", "suffix", "mtp"
"""Values of `speculate` that are no folder."""


def endpoint(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class ConfigError(Exception):
    """A setting is out of range or contradicts another. The message names the setting and the allowed values."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `npuserve serve`. A field is named for its flag, with underscores.

    docs/configuration.md describes all fields. Fields with special values, units or formats:

    model: folder or hub name; "" is the built-in model.
    port, metrics_port: 0 takes a free port.
    metrics_host: "" is `host`.
    health_port, openai_port: 0 opens no such port.

    max_model_len: tokens of prompt and answer; 0 takes the model's limit.
    block_size: tokens per KV-cache block; 0 takes the backend's choice.
    kv_cache_memory: bytes; 0 takes a share of the free memory.
    kv_offload_memory: bytes; 0 keeps no evicted blocks and states.
    kv_store: HOST:PORT of a store's master; "" is no store.
    kv_store_memory: bytes that this server lends to the store.
    max_queue: maximum number of waiting requests.
    emulate_relax, decode_buckets: comma-separated lists, parsed by `relaxations` and `buckets`.

    tls_*, api_keys: paths of files, reloaded when they change; "" for none.
    openai_api_keys: path of a file, read at the start; "" for none.
    min_priority, max_priority: range of a request's priority, unless its API key has its own.
    admin_certificates: comma-separated list, parsed by `admin_names`.

    kv_events_endpoint, kv_events_replay_endpoint: ZeroMQ addresses; "" for no replays.
    kv_events_buffer: batches that are kept.
    profile_dir: folder for traces of profiles; "" refuses profiles.
    """

    model: str = ""
    served_name: str = ""
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_host: str = ""
    metrics_port: int = 9090
    device: Literal["auto", "cpu", "npu", "cuda"] = "auto"
    emulate: bool = False
    emulate_relax: str = ""
    decode_buckets: str = ""
    capture: Literal["auto", "on", "decoder", "off"] = "auto"
    capture_chunks: bool = True
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    lm_head_dtype: Literal["auto", "int8"] = "auto"
    task: Literal["auto", "rank"] = "auto"
    max_model_len: int = 0
    block_size: int = 0
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_memory: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256
    max_requests_per_client: int = 0
    max_preparing: int = 512
    max_refusals_per_second: int = 100
    max_buffered_tokens: int = 512
    slow_reader_seconds: float = 300.0
    stream_interval: int = 1
    prefix_cache: bool = True
    kv_offload_memory: int = 0
    kv_store: str = ""
    kv_store_secret: str = ""
    kv_store_memory: int = 1 << 30
    kv_store_timeout_seconds: float = 1.0
    share_prefix_cache: Literal["tenant", "all"] = "tenant"
    kv_events: Literal["off", "grpc", "zmq"] = "off"
    kv_events_endpoint: str = "tcp://*:5557"
    kv_events_replay_endpoint: str = ""
    kv_events_buffer: int = 10000
    double_buffering: bool = True
    speculate: str = "off"
    draft_depth: int = 3
    prefill_device: Literal["same", "cpu"] = "same"
    frontends: int = 1
    max_connections: int = 1024
    max_message_size: int = 0
    max_connection_age_seconds: float = 0.0
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    threads: int = 0
    cpu_gemm: Literal["auto", "amx", "bf16", "fma"] = "auto"
    cpu_weights: Literal["auto", "plain", "compact"] = "auto"
    cpu_binding: Literal["auto", "off"] = "auto"
    priority_aging_seconds: float = 10.0
    min_priority: int = 0
    max_priority: int = 100
    plain_content: bool = True
    kernel_sampling: int = 32
    drain_seconds: float = 30.0
    hang_seconds: float = 60.0
    load_seconds: float = 0.0
    resume_seconds: float = 60.0
    health_port: int = 0
    openai_port: int = 0
    log_format: Literal["auto", "text", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False
    debuggable: bool = False
    profile_dir: str = ""
    metrics_vllm_aliases: bool = False
    target_ttft_seconds: float = 2.0
    target_itl_seconds: float = 0.2
    otlp_endpoint: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    api_keys: str = ""
    openai_api_keys: str = ""
    admin_certificates: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value} is not in [{low}, {high}]")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len: 1 is not 0 or at least 2: a prompt and an answer need a token each")
        if not self.host:
            raise ConfigError("host: must not be empty; 0.0.0.0 is all addresses")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not 0 or a power of two up to 1024")
        match = re.fullmatch(r"https?://[^/\s]+:(\d{1,5})/?", self.otlp_endpoint)
        if self.otlp_endpoint and not match:
            raise ConfigError(f"otlp_endpoint: {self.otlp_endpoint!r} must be like http://host:4317, https:// for TLS")
        if match and not 1 <= int(match[1]) <= 65535:
            raise ConfigError(f"otlp_endpoint: the port must be in [1, 65535], got {self.otlp_endpoint!r}")
        if self.emulate_relax and not self.emulate:
            raise ConfigError("emulate_relax: nothing is emulated; --emulate does")
        if not all(1 <= rows <= 65536 for rows in self.buckets):
            raise ConfigError(f"decode_buckets: {self.decode_buckets!r} must be numbers in [1, 65536], as in 1,2,4,8")
        if self.min_priority > self.max_priority:
            raise ConfigError(f"min_priority: {self.min_priority} is above max_priority, {self.max_priority}")
        self._check_speculation()
        self._check_edge()
        self._check_openai()
        self._check_prefix_cache()
        self._check_kv_events()

    def _check_speculation(self) -> None:
        if self.speculate not in SPECULATE and "/" not in self.speculate and not self.speculate.startswith(("~", ".")):
            hint = did_you_mean(self.speculate.lower(), SPECULATE, otherwise="; a folder here is ./NAME")
            raise ConfigError(
                f"speculate: {self.speculate!r} is neither one of {', '.join(SPECULATE)} nor the path of a folder"
                f"{hint}")
        if self.speculate not in ("off", "auto", "suffix") and self.max_num_seqs >= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs: {self.max_num_seqs} leaves no tokens of a step to drafts, which speculate "
                f"{self.speculate} computes; it must be below max_num_batched_tokens, {self.max_num_batched_tokens}")

    def _check_edge(self) -> None:
        """Check the settings of addresses, ports and TLS against each other."""
        for name, host in (("host", self.host), ("metrics_host", self.metrics_host)):
            if match := re.fullmatch(r"([^:\[\]]+):(\d+)", host):
                port = name.replace("host", "port")
                raise ConfigError(f"{name}: {host!r} has a port; give {name} {match[1]} and {port} {match[2]}")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise ConfigError(f"{missing}: is missing; {given} needs it")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca: clients can only be authenticated with tls_cert and tls_key")
        if self.admin_certificates and not self.tls_client_ca:
            raise ConfigError("admin_certificates: clients have certificates only with tls_client_ca")
        if self.port and self.port == self.metrics_port and self.metrics_host in ("", self.host):
            raise ConfigError(f"metrics_port: {self.metrics_port} is already the port of gRPC; 0 takes a free one")
        if self.health_port and self.health_port in (self.port, self.metrics_port):
            raise ConfigError(f"health_port: {self.health_port} is already the port of gRPC or of metrics")

    def _check_openai(self) -> None:
        """Check that HTTP clients get no more rights than clients of gRPC."""
        if self.openai_api_keys and not self.openai_port:
            raise ConfigError("openai_api_keys: there are no HTTP clients without openai_port")
        if not self.openai_port:
            return
        if self.openai_port in (self.port, self.metrics_port, self.health_port):
            raise ConfigError(f"openai_port: {self.openai_port} is already the port of gRPC, of metrics or of health")
        if self.api_keys and not self.openai_api_keys:
            raise ConfigError("openai_api_keys: is missing; with api_keys, HTTP clients need keys too: a file of lines "
                              "NAME:KEY")
        if self.tls_client_ca:
            raise ConfigError("openai_port: HTTP clients cannot be asked for the certificates of tls_client_ca")

    def _check_prefix_cache(self) -> None:
        if self.kv_offload_memory and not self.prefix_cache:
            raise ConfigError("kv_offload_memory: there are no prefixes to keep without prefix_cache")
        if self.kv_store_secret and not self.kv_store:
            raise ConfigError("kv_store_secret: there is no store; kv_store names one")
        if not self.kv_store:
            return
        match = re.fullmatch(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", self.kv_store)
        if not match or not 1 <= int(match[1]) <= 65535:
            raise ConfigError(f"kv_store: {self.kv_store!r} must be HOST:PORT of the store's master, with a port in "
                              "[1, 65535], as in 10.0.0.5:50051")
        if not self.kv_offload_memory:
            raise ConfigError("kv_store: needs kv_offload_memory, through which blocks are saved and loaded")
        if not self.kv_store_secret:
            raise ConfigError("kv_store_secret: is missing; kv_store needs a file of a secret, the same on all servers "
                              "that share prefixes, as `openssl rand -hex 32` writes")
        if self.tensor_parallel_size > 1:
            raise ConfigError("kv_store: is not possible with a tensor_parallel_size above 1")

    def _check_kv_events(self) -> None:
        if self.kv_events != "off" and not self.prefix_cache:
            raise ConfigError("kv_events: there are none without prefix_cache")
        for name, value in (("kv_events_endpoint", self.kv_events_endpoint),
                            ("kv_events_replay_endpoint", self.kv_events_replay_endpoint)):
            if value and not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}|ipc://\S+", value):
                raise ConfigError(f"{name}: {value!r} must be like tcp://*:5557 or ipc://PATH")
            if value.startswith("tcp://") and int(value.rpartition(":")[2]) > 65535:
                raise ConfigError(f"{name}: the port must be in [0, 65535], got {value!r}")
        if self.kv_events == "zmq" and not self.kv_events_endpoint:
            raise ConfigError("kv_events_endpoint: must not be empty with kv_events zmq")
        if self.kv_events_replay_endpoint and self.kv_events != "zmq":
            raise ConfigError("kv_events_replay_endpoint: replays need kv_events zmq")

    @property
    def relaxations(self) -> tuple[str, ...]:
        """Return what the emulated device accepts beyond the real one, such as fp32."""
        return tuple(name.strip() for name in self.emulate_relax.split(",") if name.strip())

    @property
    def admin_names(self) -> frozenset[str]:
        """Return the names of the client certificates that may call AdminService."""
        return frozenset(name.strip() for name in self.admin_certificates.split(",") if name.strip())

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the row counts of the captured decode steps, ascending; () for the device's choice.

        An entry that is not a number becomes 0, which the check of the configuration rejects.
        """
        parts = [part.strip() for part in self.decode_buckets.split(",") if part.strip()]
        return tuple(sorted({int(part) if part.isdecimal() and len(part) < 1000 else 0 for part in parts}))


def to_json(config: ServerConfig) -> bytes:
    return msgspec.json.encode(config)
