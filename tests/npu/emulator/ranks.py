"""Tests on several emulated NPUs: `@on_ranks(...)` runs a test in one process for each rank, at the same time.

    pytest ── a thread for each rank ──► Child ── group(...) ──► the test, with the number of its rank
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from tests.npu.emulator import child

F = TypeVar("F", bound=Callable[..., Any])

WAIT = timedelta(seconds=60)
"""Time for a rank to wait for another one outside of the device."""


class Place(NamedTuple):
    """Number of a rank, number of all, and the store where they meet."""

    rank: int
    size: int
    store: Any


def start(
    module: str, name: str, rank: int, size: int, folder: str, environment: Mapping[str, str],
    arguments: dict[str, Any], joined: bool,
) -> Any:
    """Call a test in a process of a rank. The first collective of its group creates the communicator.

    folder: where the ranks meet.
    """
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    named = getattr(importlib.import_module(module), name)
    test = getattr(named, "__wrapped__", named)
    store = dist.FileStore(f"{folder}/store", size)
    try:
        if not joined:
            return test(Place(rank, size, store), **arguments)
        if environment.get("SET_DEVICE", "1") == "1":
            torch.npu.set_device(rank)
        dist.init_process_group("hccl", store=store, rank=rank, world_size=size, timeout=WAIT)
        return test(rank, **arguments)
    finally:
        # No rank ends before the others have finished: they read its memory.
        store.set(f"end-{rank}", b"1")
        store.wait([f"end-{other}" for other in range(size)], WAIT)


def run(
    test: Callable[..., Any], size: int, environment: Mapping[str, str], options: dict[str, Any],
    arguments: dict[str, Any], *, joined: bool = True,
) -> list[Any]:
    """Return what the test returns on each rank. Raises the error of the first rank that fails."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    children = child.start_children(size, options, test.__module__)

    def follow(rank: int) -> None:
        try:
            results[rank] = children[rank].run(start, {
                "module": test.__module__, "name": test.__name__, "rank": rank, "size": size, "folder": folder,
                "environment": environment, "arguments": arguments, "joined": joined}, fresh=True)
        except BaseException as error:
            errors.append(error)

    with TemporaryDirectory() as folder:
        threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for process in children:
            process.close()
    if errors:
        raise errors[0]
    return results


def on_ranks(
    size: int = 2, *, environment: Mapping[str, str] | None = None, joined: bool = True, **options: Any
) -> Callable[[F], F]:
    """Decorate a test to run on `size` emulated NPUs. Its first argument is its rank.

    environment: environment variables of the ranks, beyond pytest's.
    joined: the ranks have joined an HCCL group. Otherwise the first argument is a `Place`.
    options: arguments of `emulator.activate`.
    """

    def mark(test: F) -> F:
        @child.needs_npu
        @functools.wraps(test)
        def in_children(**arguments: Any) -> None:
            run(test, size, environment or {}, options, arguments, joined=joined)

        signature = inspect.signature(test)
        in_children.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:])
        return in_children  # type: ignore[return-value]

    return mark


