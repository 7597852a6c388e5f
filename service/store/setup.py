"""Set-up of a store: checks, the identity of the values, and the client."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import npuserve
from npuserve.service import logs
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.store import keys
from npuserve.service.store.client import StoreClient
from npuserve.service.store.messages import Start

if TYPE_CHECKING:
    from npuserve.npu.execution.host_blocks import HostBlocks
    from npuserve.npu.execution.runner import Runner

log = logging.getLogger("npuserve.service.store.setup")

IMPORT_SECONDS = 60.0
"""Maximum time to import Mooncake's client."""
MAX_SAVE_BYTES = 256 << 20
"""Bytes of blocks and states that wait to be saved to the store, from which on no further one waits."""
SAVE_SHARE = 4
"""The same as a share of the slots: 1 / SAVE_SHARE."""


class OpenedStore(NamedTuple):
    """Store of an engine.

    max_saves: see `max_saves`.
    root_key: key of the digests of blocks.
    """

    client: StoreClient
    max_saves: int
    root_key: bytes


def open_store(
    config: ServerConfig, folders: Sequence[str], runner: Runner, memory: HostBlocks, *, is_first: bool
) -> OpenedStore | None:
    """Begin to connect to the store; None without one, and in a restarted engine whose secret has become unusable.

    folders: of the models.
    memory: of the runner.
    is_first: the engine is the server's first one.

    Raises ConfigError.
    """
    if not config.kv_store:
        return None
    try:
        secret = keys.read_secret(config.kv_store_secret)
    except (OSError, ValueError) as error:
        reason = f"kv_store_secret: {config.kv_store_secret}: {getattr(error, 'strerror', None) or error}"
        if is_first:
            raise ConfigError(reason) from None
        logs.event(log, "the store is off until the next start of the engine", level=logging.ERROR, error=reason)
        return None
    if runner.predicts:
        raise ConfigError(f"kv_store: is not possible with drafts of a head or a smaller model (speculate "
                          f"{config.speculate}); speculate suffix and off are")
    if is_first:
        check_import()
    slots = memory.describe()
    start = Start(config.kv_store, config.kv_store_secret, config.kv_store_memory, slots.block_bytes,
                  facts_of(runner, memory.layout), tuple(folders))
    limit = max_saves(slots.num_slots, slots.block_bytes)
    client = StoreClient(start, memory, config.kv_store_timeout_seconds, limit + slots.state_parts)
    return OpenedStore(client, limit, keys.root_key(secret))


def max_saves(num_slots: int, block_bytes: int) -> int:
    """Return the number of slots that wait to be saved to the store from which on no further block or state waits."""
    return max(1, min(num_slots // SAVE_SHARE, MAX_SAVE_BYTES // block_bytes))


def facts_of(runner: Runner, layout: str) -> str:
    """Return what determines the bytes of a value beside the files of the model. One rank computes all of them."""
    return repr((
        npuserve.__version__, runner.backend_name, runner.dtype_name, str(runner.cache_dtype), runner.block_size,
        runner.config.quantization_name, layout))


def check_import() -> None:
    """Raise ConfigError unless Mooncake's client can be imported, in a process of its own."""
    if find_spec("mooncake") is None:
        raise ConfigError("kv_store: needs Mooncake's client; pip install 'npuserve[store]'")
    command = (sys.executable, "-c", "import mooncake.store")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"kv_store: Mooncake's client was not imported in {IMPORT_SECONDS:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        hint = "; Debian's package libibverbs1 has it" if "libibverbs" in reason else ""
        raise ConfigError(f"kv_store: Mooncake's client cannot be imported: {reason}{hint}")
