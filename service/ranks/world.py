"""Groups of ranks on several hosts: the environment that joins them, and the check that all serve the same.

Two environments are read: that of torchrun (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE), and that of Kubernetes'
LeaderWorkerSet (LWS_LEADER_ADDRESS, LWS_WORKER_INDEX, LWS_GROUP_SIZE), whose port is MASTER_PORT too. `npuserve serve`
runs with the same settings on each host. The host with index 0 serves; the others only compute.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from npuserve.npu.model.folder import weight_files
from npuserve.service.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

DEFAULT_PORT = 29500
"""torchrun's default of MASTER_PORT."""
NAMES = (("RANK", "WORLD_SIZE", "MASTER_ADDR"), ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"))
"""Variables of the index of this host, of the number of hosts, and of the address of the first host."""
LOCAL_SETTINGS = ("host", "port", "metrics_host", "metrics_port", "health_port", "threads", "log_format", "log_level",
                  "served_name", "model", "state_folder", "tls_cert", "tls_key", "tls_client_ca", "api_keys")
"""Settings that may differ between hosts."""


class World(msgspec.Struct, frozen=True):
    """Hosts of a group.

    host, hosts: index of this one, from 0, and number.
    address: host:port of the first host, where the ranks meet.
    """

    host: int
    hosts: int
    address: str

    def ranks(self, config: ServerConfig) -> range:
        """Return the ranks of this host."""
        local = config.tensor_parallel_size // self.hosts
        return range(self.host * local, self.host * local + local)


def read_world(config: ServerConfig, environment: Mapping[str, str]) -> World | None:
    """Return the group of hosts; None if this one is alone. Raises ConfigError for a wrong environment."""
    for index_name, count_name, address_name in NAMES:
        if count_name not in environment:
            continue
        host, hosts = _number(environment, index_name), _number(environment, count_name)
        if hosts == 1:
            return None
        if not 0 <= host < hosts:
            raise ConfigError(f"{index_name}: {host} is not in [0, {hosts - 1}], the hosts of {count_name}")
        if config.tensor_parallel_size % hosts:
            raise ConfigError(f"tensor_parallel_size: {config.tensor_parallel_size} is not a multiple of {hosts}, the "
                              f"hosts of {count_name}")
        if not environment.get(address_name):
            raise ConfigError(f"{address_name}: is needed with {count_name}")
        port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else DEFAULT_PORT
        return World(host, hosts, f"{environment[address_name]}:{port}")
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}: {text!r} must be a whole number")
    return int(text)


def check_same(group: Group, config: ServerConfig, folder: Path) -> None:
    """Compare version, settings and model with those of rank 0. All ranks call it together.

    Raises ConfigError on each rank that differs, and on rank 0 if any does.
    """
    own = {"version": importlib.metadata.version("npuserve"), "settings": _settings(config), "model": _model(folder)}
    lead = msgspec.json.decode(group.broadcast(msgspec.json.encode(own)), type=dict[str, str])
    differing = [name for name, value in own.items() if lead[name] != value]
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
