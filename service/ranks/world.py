"""Groups of ranks on several hosts: the environment that joins them, and the check that all serve the same.

Two environments are read: that of torchrun (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), and that of Kubernetes'
LeaderWorkerSet (LWS_LEADER_ADDRESS, LWS_WORKER_INDEX, LWS_GROUP_SIZE), whose port is MASTER_PORT too. `npuserve serve`
runs with the same settings on each host. The host with index 0 serves; the others only compute.

The address may be a name that DNS gets only once the first host has started, as LeaderWorkerSet's. Hosts wait for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from npuserve.npu.model.folder import weight_files
from npuserve.service import logs, probe
from npuserve.service.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

log = logging.getLogger(__name__)

DEFAULT_PORT = 29500
"""torchrun's default of MASTER_PORT."""
NAMES = (("RANK", "WORLD_SIZE", "MASTER_ADDR"), ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"))
"""Variables of the index of this host, of the number of hosts, and of the address of the first host."""
PORT_NAME = "MASTER_PORT"
MAX_HOSTS = 64
JOIN_SECONDS = 600.0
"""Maximum time to wait for the other hosts, which may still start."""
RESOLVE_SECONDS = 1.0
"""Pause between two attempts to resolve the address of the first host."""
LOCAL_SETTINGS = ("host", "port", "metrics_host", "metrics_port", "health_port", "threads", "log_format", "log_level",
                  "served_name", "model", "tls_cert", "tls_key", "tls_client_ca", "api_keys")
"""Settings that may differ between hosts."""


class World(msgspec.Struct, frozen=True):
    """Hosts of a group.

    host: index of this host, from 0.
    hosts: number of hosts.
    name, port: address of the first host, where rank 0 listens for the others.
    variables: environment variables from which host, hosts and name were read.
    """

    host: int
    hosts: int
    name: str
    port: int
    variables: tuple[str, str, str]

    @property
    def address(self) -> str:
        """Return host:port where the ranks meet."""
        return f"{self.name}:{self.port}"

    def ranks(self, config: ServerConfig) -> range:
        """Return the ranks of this host."""
        local = config.tensor_parallel_size // self.hosts
        return range(self.host * local, self.host * local + local)

    def resolve(self, seconds: float, stopped: threading.Event | None = None) -> None:
        """Wait until the first host's name resolves, at most `seconds`, or until `stopped`. Raises ConfigError."""
        end = time.monotonic() + seconds
        stopped = stopped or threading.Event()
        first = True
        while not stopped.is_set():
            try:
                socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
                return
            except (OSError, UnicodeError) as error:
                said = f"{self.variables[2]}: {self.name} does not resolve: {getattr(error, 'strerror', error)}"
            if time.monotonic() >= end:
                raise ConfigError(f"{said}; waited {seconds:g} s")
            if first:
                logs.event(log, "waiting for the address of the first host", level=logging.WARNING, reason=said)
            first = False
            stopped.wait(min(RESOLVE_SECONDS, max(end - time.monotonic(), 0)))

    def explain(self, error: Exception) -> ConfigError:
        """Return why the first host cannot listen where the ranks meet. error: of the attempt."""
        if cause := probe.cannot_listen("0.0.0.0", self.port):  # nosec B104 (closed at once)
            return ConfigError(f"{PORT_NAME}: cannot listen on port {self.port}: {cause.strerror}")
        index, _, name = self.variables
        return ConfigError(f"{name}: {self.address} does not answer here, where {index} is 0; it must be an address of "
                           f"this host: {str(error).splitlines()[0]}")


def read_world(config: ServerConfig, environment: Mapping[str, str]) -> World | None:
    """Return the group of hosts; None if this one is alone. Raises ConfigError for a wrong environment."""
    hosts_of = [_read(config, environment, names) for names in NAMES if environment.keys() & set(names[:2])]
    if len(hosts_of) == 2 and hosts_of[0][:3] != hosts_of[1][:3]:
        (index, count, _), (other, other_count, _) = NAMES
        raise ConfigError(
            f"{index} and {count}: {_said(hosts_of[0])}, but {other} and {other_count}: {_said(hosts_of[1])}; set one "
            "of the two")
    if not hosts_of or hosts_of[0][1] == 1:
        return None
    host, hosts, name, variables = hosts_of[0]
    if config.tensor_parallel_size % hosts:
        raise ConfigError(f"tensor_parallel_size: {config.tensor_parallel_size} is not a multiple of {hosts}, the "
                          f"hosts of {variables[1]}")
    return World(host, hosts, name, _number(environment, PORT_NAME, 1, 65535, str(DEFAULT_PORT)), variables)


def local_ranks(config: ServerConfig, environment: Mapping[str, str]) -> int:
    """Return the number of ranks of this host. Raises ConfigError for a wrong environment."""
    world = read_world(config, environment)
    return len(world.ranks(config)) if world else config.tensor_parallel_size


def join_seconds(config: ServerConfig) -> float:
    """Return the maximum time to wait for the other ranks."""
    return config.load_seconds or JOIN_SECONDS


_Hosts = tuple[int, int, str, tuple[str, str, str]]
"""Index of this host, number of hosts, name of the first, and the variables of the three."""


def _read(config: ServerConfig, environment: Mapping[str, str], names: tuple[str, str, str]) -> _Hosts:
    """Read one of the two environments. Raises ConfigError if it is wrong by itself."""
    index_name, count_name, address_name = names
    hosts = _number(environment, count_name, 1, MAX_HOSTS, needed_with=index_name)
    host = _number(environment, index_name, 0, hosts - 1, needed_with=count_name)
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if count_name == "WORLD_SIZE" and local != "1":
        raise ConfigError(f"LOCAL_WORLD_SIZE: {local!r} must be 1: npuserve is started once on each host, and starts "
                          "the host's ranks itself")
    address = environment.get(address_name, "")
    if not address and hosts > 1:
        raise ConfigError(f"{address_name}: is needed with {count_name}, an address of the host with {index_name} 0")
    return host, hosts, address, names


def _said(setting: _Hosts) -> str:
    host, hosts, name, _ = setting
    return f"host {host} of {hosts}, the first at {name or 'no address'}"


def _number(
    environment: Mapping[str, str], name: str, minimum: int, maximum: int, default: str = "", needed_with: str = ""
) -> int:
    text = environment.get(name, default)
    if name not in environment and needed_with:
        raise ConfigError(f"{name}: is needed with {needed_with}, a whole number in [{minimum}, {maximum}]")
    if not (text.isascii() and text.isdecimal() and minimum <= int(text[:20]) <= maximum):
        raise ConfigError(f"{name}: {text!r} must be a whole number in [{minimum}, {maximum}]")
    return int(text)


def check_same(group: Group, config: ServerConfig, folder: Path) -> None:
    """Compare version, settings and model with rank 0. All ranks call it together.

    Raises ConfigError on each rank that differs, and on rank 0 if any does.
    """
    values = {"version": importlib.metadata.version("npuserve"), "settings": _settings(config), "model": _model(folder)}
    lead = msgspec.json.decode(group.broadcast(msgspec.json.encode(values)), type=dict[str, str])
    differing = [name for name, value in values.items() if lead[name] != value]
    (first,) = group.minimum(group.rank if differing else group.size)
    if differing:
        raise ConfigError(f"rank {group.rank} and rank 0 differ in {', '.join(differing)}; all ranks need the same")
    if first < group.size and group.rank == 0:
        raise ConfigError(f"rank {first} differs from rank 0 in version, settings or model; its log says in which")


def _settings(config: ServerConfig) -> str:
    return _digest(msgspec.json.encode(
        {name: value for name, value in msgspec.structs.asdict(config).items() if name not in LOCAL_SETTINGS}))


def _model(folder: Path) -> str:
    """Return a digest of the model's configuration, and of the names and sizes of its files."""
    sizes = [(path.name, path.stat().st_size) for path in weight_files(folder)]
    return _digest((folder / "config.json").read_bytes() + msgspec.json.encode(sizes))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
