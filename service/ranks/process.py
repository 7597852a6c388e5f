"""The process of a rank other than 0: loads its shard of the model, then launches the steps of rank 0.

    python -m npuserve.service.ranks.process      started by the engine process, which writes RankArgs on its stdin
"""

from __future__ import annotations

import gc
import logging
import os
import signal

from npuserve.npu.large_import import import_large
from npuserve.service import logs
from npuserve.service.config import ConfigError
from npuserve.service.ipc import child, process_control
from npuserve.service.ranks.lead import follow
from npuserve.service.ranks.load import load_model
from npuserve.service.ranks.processes import RankArgs


def main() -> int:
    args = child.read_arguments(RankArgs)
    process_control.set_dumpable(args.config.debuggable)
    logs.setup(args.config, f"rank-{args.rank}")
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends the group
        signal.signal(number, signal.SIG_IGN)
    child.listen()
    import_large("npuserve.npu.execution.load")
    from npuserve.npu.parallel import Group, join

    size = args.config.tensor_parallel_size
    group = Group(args.rank, size, join(args.address, size), args.memory)
    try:
        runner = load_model(args.config, args.folder, lambda *_: None, group=group)
    except (ConfigError, ValueError, OSError, MemoryError) as error:
        if child.is_transient(error):
            raise
        return child.unusable(error)
    gc.freeze()
    follow(runner, group)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
