"""Front end, engine and scheduler in one process, over a runner that counts.

"cdef…" follows "ab", and "ab…" follows "z".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import msgspec

from npuserve.service.config import ServerConfig
from npuserve.service.engine.loop import Engine
from npuserve.service.frontend.process import Frontend, FrontendArgs
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.streams.records import Records
from npuserve.v1 import inference_service_pb2_grpc
from tests.support.counting_runner import FakeRunner
from tests.support.fake_engine import CYCLE, INFO, make_folder, until

BLOCK_SIZE = 16


@dataclass
class Whole:
    """Running server with its parts."""

    scheduler: Scheduler
    engine: Engine
    frontend: Frontend
    target: str

    @contextlib.asynccontextmanager
    async def client(
        self, *options: tuple[str, int]
    ) -> AsyncIterator[inference_service_pb2_grpc.InferenceServiceStub]:
        """Yield a stub on its own connection. options: channel options."""
        own = [*options, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.target, own) as channel:
            yield inference_service_pb2_grpc.InferenceServiceStub(channel)


@contextlib.asynccontextmanager
async def whole_server(
    tmp_path: Path, *, delay: float = 0.0, blocks: int = 1024, max_num_seqs: int = 8, max_queue: int = 64,
    **config: object,
) -> AsyncIterator[Whole]:
    """Serve the counting model. At the end, all requests must have ended and all blocks must be free.

    delay: seconds a step.
    blocks: size of the KV cache, in blocks of BLOCK_SIZE tokens.
    config: fields of ServerConfig.
    """
    folder = make_folder(tmp_path / "counting")
    settings = ServerConfig(**{"model": str(folder), "drain_seconds": 0.1, **config})  # type: ignore[arg-type]
    scheduler = Scheduler(
        BlockManager(blocks, BLOCK_SIZE), max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_queue=max_queue,
        aging_seconds=10)
    info = msgspec.structs.replace(
        INFO, max_model_len=min(8192, scheduler.blocks.capacity), max_num_seqs=max_num_seqs, max_queue=max_queue)
    address = f"{tmp_path}/e"
    engine = Engine(
        scheduler, FakeRunner(CYCLE, delay, BLOCK_SIZE), EngineSocket(address), info, 1,
        records=Records(settings.resume_seconds))
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    frontend = Frontend(FrontendArgs(settings, 0, address, 0))
    port = await frontend.start()
    await frontend.load(folder)
    await until(lambda: frontend._engine.state == "ready")
    try:
        yield Whole(scheduler, engine, frontend, f"127.0.0.1:{port}")
        await until(lambda: not scheduler._sequences)
    finally:
        await frontend.stop()
        engine.stop()
        thread.join(60)
    assert not thread.is_alive()
    scheduler.check_integrity()
    engine.registry.check_integrity()
    assert scheduler.blocks.counts.used == 0, "blocks leaked"
