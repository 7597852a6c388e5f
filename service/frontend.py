"""The front-end process: gRPC on one side, the engine's socket on the other. It holds no device and no torch.

    python -m npuserve.service.frontend      started by the supervisor, which writes FrontendArgs on its stdin

It listens and answers health at once, while the tokenizer is loaded in a thread and the engine process loads the
model. SIGTERM drains: not ready any more, running requests end within drain_seconds, exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from npuserve.service import child, logs
from npuserve.service.admin import AdminServicer
from npuserve.service.config import MAX_MESSAGE_BYTES, ConfigError, ServerConfig, endpoint
from npuserve.service.engine_client import EngineClient
from npuserve.service.health import Health
from npuserve.service.model_folder import ModelFolder, open_folder, resolve
from npuserve.service.servicer import InferenceServicer
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2, inference_service_pb2_grpc

if TYPE_CHECKING:
    from npuserve.service.tracing import Tracing

log = logging.getLogger("npuserve.service.frontend")

SERVICES = (
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    reflection.SERVICE_NAME,
)


class FrontendArgs(msgspec.Struct, frozen=True):
    """config: the server's. index: which front end, from 0. engine_address: of the engine's socket. port: to listen on;
    0 takes a free one."""

    config: ServerConfig
    index: int
    engine_address: str
    port: int


class Frontend:
    """One gRPC server and its connection to the engine. `start`, then `stop`, each once, on one event loop."""

    def __init__(self, args: FrontendArgs):
        self._config = args.config
        self._port = args.port
        self._engine = EngineClient(args.engine_address, lambda state: self._update())
        self._tracing = _open_tracing(args.config)
        self._inference = InferenceServicer(args.config, self._engine, self._tracing)
        self._health = Health()
        self._server = grpc.aio.server(options=_options(args.config))
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, self._server)
        admin = AdminServicer(args.config, self._engine, time.monotonic())
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(SERVICES, self._server)

    async def start(self) -> int:
        """Listen; the port. ConfigError if that fails."""
        address = endpoint(self._config.host, self._port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"port: cannot listen on {address}; is it in use?") from error
        await self._server.start()
        self._engine.start()
        return port

    async def load(self) -> None:
        """Read the model's folder and load its tokenizer, in a thread. ConfigError if it is unusable."""

        def work() -> ModelFolder:
            import npuserve.service.detokenizer  # noqa: F401  so that the first request does not wait for it

            return open_folder(resolve(self._config.model), self._config.model, self._config.served_name)

        self._inference.folder = await asyncio.to_thread(work)
        self._update()

    async def stop(self) -> None:
        """Take no new requests, let the running ones end within drain_seconds, then leave."""
        self._inference.draining = True
        self._health.drain()
        await self._server.stop(self._config.drain_seconds)
        await self._engine.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    def _update(self) -> None:
        ready = self._engine.state == "ready" and self._inference.folder is not None
        self._health.set_ready(ready)
        if ready:
            child.report("ready")


def _open_tracing(config: ServerConfig) -> Tracing | None:
    """None where nothing is to be traced: then OpenTelemetry is not even imported."""
    if not config.otlp_endpoint:
        return None
    try:
        from npuserve.service.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: {error}; pip install 'npuserve[otel]'") from None
    return Tracing(config.otlp_endpoint)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    age = math.ceil(config.max_connection_age_seconds * 1000)
    return [
        ("grpc.so_reuseport", int(config.frontends > 1)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A client's pings keep long unary calls alive and are never "too many".
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Ours find clients whose machine is gone, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Calls under way have no limit: that is gRPC's default.
        *([("grpc.max_connection_age_ms", age)] if age else []),
    ]


def _start_poller() -> None:
    """Start gRPC's own thread, which hears that a message was written, so that it takes no processor from others.

    Each write wakes it. By default it would then interrupt our thread, which has the other streams' messages still to
    write: that is a quarter of what a message costs (bench/stream_cost.py). As a batch thread it takes an idle
    processor or waits its turn. gRPC offers no setting for it, but a thread inherits the policy of who starts it.
    """
    if sys.platform != "linux":
        return  # gRPC starts it with the server
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a sandbox forbids it
        return
    try:
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]
    finally:
        os.sched_setscheduler(0, policy, parameters)


async def serve(args: FrontendArgs) -> None:
    """Serve until SIGTERM or the parent's end. ConfigError if the port or the model's folder is unusable."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, leave.set)

    def orphaned() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: leaving already
            loop.call_soon_threadsafe(leave.set)

    child.on_parent_death(orphaned)
    _start_poller()
    frontend = Frontend(args)
    child.report("listening", port=await frontend.start())
    loading = asyncio.ensure_future(frontend.load())
    leaving = asyncio.ensure_future(leave.wait())
    try:
        await asyncio.wait((loading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await leaving
        logs.event(log, "draining", drain_seconds=args.config.drain_seconds)
    finally:
        await frontend.stop()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's
    args = child.read_arguments(FrontendArgs)
    logs.setup(args.config, f"frontend-{args.index}")
    try:
        asyncio.run(serve(args))
    except ConfigError as error:
        print(f"npuserve: {error}", file=sys.stderr)
        return child.UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
