"""The server's configuration: frozen, complete and checked before anything is built.

`ServerConfig` is made once by the command line (flags, then NPUSERVE_* variables, then a TOML file) and handed to
every process as JSON. What is discovered later (KV-cache size, the model's limits) is a return value, never written
back here.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
"""Of a gRPC message, either way, at the server and at our own clients."""
MAX_DRAIN_SECONDS = 86400
PRIORITIES = (-100, 100)
"""Range of any request's priority; lower is earlier."""


def endpoint(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class ConfigError(Exception):
    """A setting is out of range or contradicts another; the message names it and what is allowed."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that `npuserve serve` can be told. Field names are the flags' with underscores.

    model: a folder, a hub name, or "" for the built-in model. port, metrics_port: 0 takes a free one.
    max_model_len: tokens of prompt and answer; 0 takes the model's own. block_size: tokens a KV-cache block; 0 takes
    the backend's. kv_cache_memory: bytes; 0 takes what is free, within reason. max_queue: requests that wait.
    emulate_relax, decode_buckets: lists with commas, see `relaxations` and `buckets`. health_port: 0 is none. tls_*,
    api_keys: files, read again when they change; "" for none. metrics_host: "" is `host`. min_priority, max_priority:
    the range of a request's priority, where its API key has no own. admin_certificates: a list with commas, see
    `admin_names`.
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
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    lm_head_dtype: Literal["auto", "int8"] = "auto"
    max_model_len: int = 0
    block_size: int = 0
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
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
    share_prefix_cache: bool = False
    double_buffering: bool = True
    prefill_device: Literal["same", "cpu"] = "same"
    frontends: int = 1
    max_connections: int = 1024
    max_message_size: int = 0
    max_connection_age_seconds: float = 0.0
    tensor_parallel_size: int = 1
    threads: int = 0
    cpu_gemm: Literal["auto", "amx", "bf16", "fp32"] = "auto"
    cpu_weights: Literal["auto", "plain", "compact"] = "auto"
    priority_aging_seconds: float = 10.0
    min_priority: int = 0
    max_priority: int = 100
    chat_special_tokens: bool = False
    kernel_sampling: int = 32
    drain_seconds: float = 30.0
    hang_seconds: float = 60.0
    load_seconds: float = 0.0
    resume_seconds: float = 60.0
    state_folder: str = ""
    health_port: int = 0
    log_format: Literal["auto", "text", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False
    debuggable: bool = False
    metrics_vllm_aliases: bool = False
    target_ttft_seconds: float = 2.0
    target_itl_seconds: float = 0.2
    otlp_endpoint: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    api_keys: str = ""
    admin_certificates: str = ""

    def __post_init__(self) -> None:
        ranges = {
            "port": (0, 65535), "metrics_port": (0, 65535), "max_model_len": (0, 1 << 24), "block_size": (0, 1024),
            "kv_cache_memory": (0, 1 << 50), "max_num_seqs": (1, 65536), "max_num_batched_tokens": (1, 1 << 20),
            "max_queue": (0, 1 << 20), "max_requests_per_client": (0, 1 << 20), "max_preparing": (1, 1 << 20),
            "max_refusals_per_second": (0, 1 << 20),
            "max_connections": (1, 1 << 20), "max_message_size": (0, MAX_MESSAGE_BYTES),
            "max_buffered_tokens": (1, 1 << 20),
            "slow_reader_seconds": (1, 86400), "stream_interval": (1, 1024),
            "frontends": (1, 64), "tensor_parallel_size": (1, 64), "threads": (0, 1024),
            "priority_aging_seconds": (0.001, 1e6), "kernel_sampling": (0, 1 << 20),
            "min_priority": PRIORITIES, "max_priority": PRIORITIES,
            "drain_seconds": (0, MAX_DRAIN_SECONDS),
            "hang_seconds": (5, 86400), "load_seconds": (0, 86400), "resume_seconds": (0, 86400),
            "health_port": (0, 65535),
            "max_connection_age_seconds": (0, 86400),
            "target_ttft_seconds": (0.001, 3600), "target_itl_seconds": (0.001, 3600),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}: {value} is not in [{low}, {high}]")
        if not self.host:
            raise ConfigError("host: must not be empty; 0.0.0.0 is all addresses")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two")
        if self.otlp_endpoint and not re.fullmatch(r"https?://[^/\s]+:\d+/?", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint: {self.otlp_endpoint!r} must be like http://host:4317, https:// for TLS")
        if self.emulate_relax and not self.emulate:
            raise ConfigError("emulate_relax: nothing is emulated; --emulate does")
        if not all(1 <= rows <= 65536 for rows in self.buckets):
            raise ConfigError(f"decode_buckets: {self.decode_buckets!r} must be numbers in [1, 65536], as in 1,2,4,8")
        if self.min_priority > self.max_priority:
            raise ConfigError(f"min_priority: {self.min_priority} is above max_priority, {self.max_priority}")
        self._check_edge()
        reserved = {
            "tensor_parallel_size": 1,
        }
        for name, only in reserved.items():
            if getattr(self, name) != only:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is reserved, not implemented in this version")

    def _check_edge(self) -> None:
        """What the ports and the files of TLS need of each other."""
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise ConfigError(f"{missing}: {given} needs it")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca: clients can only be authenticated with tls_cert and tls_key")
        if self.admin_certificates and not self.tls_client_ca:
            raise ConfigError("admin_certificates: clients have certificates only with tls_client_ca")
        if self.health_port and self.health_port in (self.port, self.metrics_port):
            raise ConfigError(f"health_port: {self.health_port} is that of gRPC or of metrics already")

    @property
    def relaxations(self) -> tuple[str, ...]:
        """What the emulated device accepts beyond what the real one does."""
        return tuple(name.strip() for name in self.emulate_relax.split(",") if name.strip())

    @property
    def admin_names(self) -> frozenset[str]:
        """Names of the client certificates that may call AdminService."""
        return frozenset(name.strip() for name in self.admin_certificates.split(",") if name.strip())

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of the decode steps that are captured, ascending; () for the device's own choice; 0 where the setting
        is not a number."""
        found = [part.strip() for part in self.decode_buckets.split(",") if part.strip()]
        return tuple(sorted({int(part) if part.isdecimal() else 0 for part in found}))


def to_json(config: ServerConfig) -> bytes:
    return msgspec.json.encode(config)
