"""The process of a rank other than 0: loads its shard of the model, then launches the steps of rank 0.

    python -m npuserve.service.ranks.follower      started by a process that writes RankArgs on its stdin
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path

from npuserve.npu.large_import import TorchError, import_large, import_torch
from npuserve.service import logs
from npuserve.service.config import ConfigError
from npuserve.service.processes import child, process_control
from npuserve.service.ranks import faults
from npuserve.service.ranks.lead import follow
from npuserve.service.ranks.load import load_model
from npuserve.service.ranks.processes import RankArgs
from npuserve.service.ranks.world import check_same, join_seconds

log = logging.getLogger("npuserve.service.ranks.follower")


def main() -> int:
    args = child.read_arguments(RankArgs)
    process_control.set_dumpable(args.config.debuggable)
    logs.setup(args.config, f"rank-{args.rank}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 ends the group
        signal.signal(number, signal.SIG_IGN)
    child.listen()
    try:
        return run(args)
    except Exception as error:
        return faults.fault_code(error, args.may_drop_captures)


def run(args: RankArgs) -> int:
    """Run the rank until rank 0 stops it. Return the exit code."""
    try:
        import_torch()
    except TorchError as error:
        return child.report_unusable(error)
    import_large("npuserve.npu.execution.load")
    from npuserve.npu.execution.load import SharedMemory
    from npuserve.npu.parallel import Group, MissingRanks, TakenRank, join, wait_for_ranks

    size = args.config.tensor_parallel_size
    seconds = join_seconds(args.config)
    try:
        store = join(args.address, size, seconds)
        wait_for_ranks(store, args.rank, size, seconds)
        group = Group(args.rank, size, store, args.memory, args.local)
        check_same(group, args.config, Path(args.folder))
        memory = SharedMemory(args.weights, args.shared_weights) if args.weights >= 0 else None
        runner = load_model(args.config, args.folder, lambda *_: None, memory,
                            capture=args.capture or None, group=group)
    except TakenRank as error:
        logs.event(log, "the rank cannot join the group now", level=logging.WARNING, error=str(error))
        return 1
    except (ConfigError, MissingRanks, ValueError, OSError, MemoryError) as error:
        return faults.start_code(error, args.may_drop_captures)
    gc.freeze()
    child.report("ready", shared_weights=runner.shared_weights)
    follow(runner, group)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
