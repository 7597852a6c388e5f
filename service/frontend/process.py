"""The front-end process: gRPC on one side, the engine's socket on the other. It holds no device and no torch.

    python -m npuserve.service.frontend.process      started by the supervisor, which writes FrontendArgs on its stdin

It listens and answers health at once, while the supervisor downloads the model, the tokenizer is loaded in a thread and
the engine process loads the model.

The supervisor's order, or SIGTERM, drains: readiness goes down, and new calls are refused with UNAVAILABLE and
RetryInfo. After REFUSE_SECONDS idle connections are closed (connections.py) and the others get GOAWAY. Their clients
connect anew: to another server, where a balancer has one; on this one they are refused again. Running calls have the
drain's seconds; the remaining ones then end with UNAVAILABLE, RetryInfo and their resume token. Then the process exits
with code 0, each phase being bounded (child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.service import logs
from npuserve.service.access.auth import Guard
from npuserve.service.config import MAX_MESSAGE_BYTES, ConfigError, ServerConfig, endpoint
from npuserve.service.errors import Unavailable
from npuserve.service.frontend import reflection
from npuserve.service.frontend.admin import AdminServicer
from npuserve.service.frontend.inference import InferenceServicer
from npuserve.service.ipc import child, process_control, short_slice
from npuserve.service.ipc.engine_client import EngineClient
from npuserve.service.ipc.heartbeat import Pulse
from npuserve.service.requests import message_limits
from npuserve.service.requests.intake import Intake
from npuserve.service.requests.parser import ParsingServer
from npuserve.service.requests.preparation import Preparation
from npuserve.service.requests.reader import WINDOW_BYTES, RequestReader
from npuserve.service.rpc import aio_server
from npuserve.service.rpc.connections import Connections
from npuserve.service.rpc.health import Health
from npuserve.service.rpc.refusal_pace import RefusalPace
from npuserve.service.text.model_folder import ModelFolder, open_folder
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2, inference_service_pb2_grpc

if TYPE_CHECKING:
    from npuserve.service.access.api_keys import Keys
    from npuserve.service.access.file_watch import Watched
    from npuserve.service.access.tls import Tls
    from npuserve.service.rpc.tracing import Tracing

log = logging.getLogger("npuserve.service.frontend.process")

BEAT_SECONDS = 0.5
STALL_SHARE = 0.5
"""Of hang_seconds: an engine that is silent for so long gets no new requests; it has lost nothing if it comes round."""
SETTLE_SECONDS = 0.2
"""Minimum length of a drain: calls that are on their way get their refusal, and health watchers get NOT_SERVING."""
REFUSE_SECONDS = 0.8
"""Time from then to the closing of connections, while calls run. The retry of a refused call comes later: RetryInfo
says 1 s."""
POLLER_SECONDS = 0.003
"""The slice of gRPC's thread: longer than the usual one, so that it waits until a step's messages are written."""

SWITCH_SECONDS = 0.0005
"""After which a thread that prepares a request hands the interpreter to the event loop. By default each of a loop's
rounds waits 5 ms for it."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 256 << 10
READ_BYTES = 64 << 10
MIN_STREAMS = 256
"""Calls that a connection may have under way, where `max_num_seqs` and `max_queue` are small."""
METADATA_BYTES = 8 << 10
"""Metadata of a call; above, calls are refused at random, and above twice as much, always."""

SERVICES = (
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
)


class FrontendArgs(msgspec.Struct, frozen=True):
    """config: the server's. index: which front end, from 0. engine_address: of the engine's socket. port: to listen on;
    0 takes a free one. pulse: the heartbeat's file. folder: the model's; None while it is downloaded: an order with it
    follows. last_good: private folder for copies of files that were good, "" for none."""

    config: ServerConfig
    index: int
    engine_address: str
    port: int
    pulse: str = ""
    folder: str | None = None
    last_good: str = ""


class Frontend:
    """One gRPC server and its connection to the engine. `start`, then `stop`, each once, on one event loop.

    Raises ConfigError if the files of TLS or of the keys are unusable.
    """

    def __init__(self, args: FrontendArgs):
        config = self._config = args.config
        self._port = args.port
        self._pulse = Pulse(args.pulse)
        self._tls = _open_tls(config)
        self._keys = _open_keys(config, args.last_good)
        stall = config.hang_seconds * STALL_SHARE
        self._engine = EngineClient(
            args.engine_address, lambda state: self._update(), stall, config.resume_seconds, config.max_buffered_tokens,
            config.slow_reader_seconds, config.stream_interval)
        self._tracing = _open_tracing(config)
        self._preparation = Preparation(config.max_preparing)
        self._inference = InferenceServicer(config, self._engine, self._preparation, self._tracing)
        self._admin = AdminServicer(config, self._engine, time.monotonic())
        self._health = Health()
        self._connections = Connections()
        self._pace = RefusalPace(config.max_refusals_per_second)
        self._largest = _largest_message(config, args.folder)
        self._intake, self._health_intake, self._reflection_intake = (
            Intake(RequestReader(self._largest), self._preparation, self._limit) for _ in range(3))
        self._servers = [self._server()]

    async def start(self) -> int:
        """Listen; the port. ConfigError if that fails."""
        (server,) = self._servers
        self._port = self._listen(server, "port", self._port)
        await server.start()
        if self._config.health_port:
            probes = aio_server.server([], _options(self._config, message_limits.SMALL_BYTES))
            probe_intake = Intake(RequestReader(message_limits.SMALL_BYTES), self._preparation, self._limit)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, ParsingServer(probes, probe_intake.message))
            self._listen(probes, "health_port", self._config.health_port)
            await probes.start()
            self._servers.append(probes)
        self._engine.start()
        self._beating = asyncio.ensure_future(self._beat())
        return self._port

    async def load(self, folder: Path) -> None:
        """Read the model's folder and load its tokenizer, in a thread. ConfigError if it is unusable."""

        def work() -> ModelFolder:
            import npuserve.service.text.detokenizer  # noqa: F401  so that the first request does not wait for it

            return open_folder(folder, self._config.model, self._config.served_name)

        self._inference.folder = await asyncio.to_thread(work)
        self._update()

    def warm(self) -> None:
        """What the first request of its kind would wait for."""
        folder = self._inference.folder
        if folder and folder.tokenizer and folder.tokenizer.chat:
            folder.tokenizer.chat.start()

    async def stop(self, seconds: float | None = None) -> None:
        """Refuse new calls, give the running ones `seconds` to end (None: drain_seconds), then stop."""
        seconds = self._config.drain_seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        self._inference.draining = True
        self._health.drain()
        await asyncio.sleep(min(SETTLE_SECONDS, seconds))
        moving: asyncio.Task[None] | None = None
        if not await self._connections.wait_until_none(min(REFUSE_SECONDS, end - time.monotonic())):
            moving = asyncio.ensure_future(self._move_clients(end))
            await self._connections.wait_until_none(end - time.monotonic())
        kept = self._config.state_folder
        rest = "x-resume-token goes on with it at the next start" if kept else "what it has is gone"
        self._preparation.give_up(Unavailable("the server leaves before the request is prepared"))
        self._engine.give_up(Unavailable(f"the server leaves before the answer's end; {rest}"))
        await self._engine.close()
        await self._connections.wait_until_none(child.LAST_WORDS_SECONDS)
        if moving:
            moving.cancel()
        stopping = [asyncio.ensure_future(server.stop(None)) for server in self._servers]
        await asyncio.wait(stopping, timeout=child.STOP_SECONDS)
        self._beating.cancel()
        self._preparation.close()
        if self._tracing:
            self._tracing.close()  # not in the loop's threads, which may all wait for the chat template

    async def _move_clients(self, end: float) -> None:
        """Close idle connections, send GOAWAY on the others, and answer new connections by another gRPC server.

        end: of the drain, time.monotonic() seconds. `stop` stops both servers some time after it.
        """
        self._connections.close_idle(self._port)
        stopping = asyncio.ensure_future(self._servers[0].stop(end - time.monotonic() + child.FRONTEND_MARGIN))
        server = self._server()
        try:
            while True:
                try:
                    self._listen(server, "port", self._port)
                    break
                except ConfigError:  # until the first server has given the port back
                    await asyncio.sleep(0.02)
            self._servers.append(server)
            await server.start()
            await stopping
        finally:
            stopping.cancel()

    def _server(self) -> grpc.aio.Server:
        guard = Guard(self._keys, self._config.admin_names, self._pace)
        server = aio_server.server([guard], _options(self._config, self._largest))
        parsing = ParsingServer(server, self._intake.message, self._connections.begin)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, parsing)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, parsing)
        health_pb2_grpc.add_HealthServicer_to_server(
            self._health, ParsingServer(server, self._health_intake.message, self._connections.begin))
        reflection.add_reflection(
            SERVICES, ParsingServer(server, self._reflection_intake.message, self._connections.begin))
        return server

    def _limit(self, kind: Descriptor) -> int:
        """Return the bytes that a request's message of this kind may have now."""
        info, folder = self._engine.model_info, self._inference.folder
        if self._config.max_message_size or info is None or folder is None:
            return self._largest
        token_bytes = folder.tokenizer.max_token_bytes if folder.tokenizer else 1
        return min(self._largest, message_limits.limit_of(kind, info.max_model_len, token_bytes, info.vocabulary_size))

    def _listen(self, server: grpc.aio.Server, setting: str, port: int) -> int:
        address = endpoint(self._config.host, port)
        try:
            if self._tls and setting == "port":
                return server.add_secure_port(address, self._tls.credentials)
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"{setting}: cannot listen on {address}; is it in use?") from error

    async def _beat(self) -> None:
        """Signs of life for the supervisor, and a look at the files that may change."""
        while True:
            self._pulse.beat()
            if self._tls:
                self._tls.look()
            if self._keys:
                self._keys.look()
            await asyncio.sleep(BEAT_SECONDS)

    def _update(self) -> None:
        ready = self._engine.state == "ready" and self._inference.folder is not None
        self._health.set_ready(ready)
        if ready:
            child.report("ready")


def _open_tls(config: ServerConfig) -> Tls | None:
    if not config.tls_cert:
        return None
    from npuserve.service.access.tls import Tls

    return Tls(config)


def _open_keys(config: ServerConfig, last_good: str) -> Watched[Keys] | None:
    if not config.api_keys:
        return None
    from npuserve.service.access import api_keys as keys
    from npuserve.service.access.file_watch import Watched
    from npuserve.service.access.last_good import LastGood

    if not config.tls_cert:
        logs.event(log, "API keys cross the network as they are: there is no TLS", level=logging.WARNING)
    copy = Path(last_good) / "api_keys" if last_good else None
    return Watched("api_keys", [config.api_keys], LastGood("api_keys", config.api_keys, copy, keys.read).read)


def _open_tracing(config: ServerConfig) -> Tracing | None:
    """None where nothing is to be traced: then OpenTelemetry is not even imported."""
    if not config.otlp_endpoint:
        return None
    try:
        from npuserve.service.rpc.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: {error}; pip install 'npuserve[otel]'") from None
    return Tracing(config.otlp_endpoint)


def _largest_message(config: ServerConfig, folder: str | None) -> int:
    """Return the bytes of a message that the channel lets pass. The channel is made before the tokenizer is loaded, so
    that this is what a model of this context can need at most; MAX_MESSAGE_BYTES where the context is not known."""
    if config.max_message_size:
        return config.max_message_size
    context = config.max_model_len
    if not context and folder is not None:
        with contextlib.suppress(ModelError, OSError, ValueError):  # the engine says what is wrong with the folder
            context = ModelConfig.from_folder(folder).context_length
    return message_limits.max_message_bytes(context) if context else MAX_MESSAGE_BYTES


def _options(config: ServerConfig, largest: int) -> list[tuple[str, int]]:
    """largest: bytes of a request's message."""
    age = math.ceil(config.max_connection_age_seconds * 1000)
    return [
        ("grpc.so_reuseport", int(config.frontends > 1)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", largest),
        # intake.py refuses compressed messages: a few KiB may stand for MiBs. gRPC would refuse them by itself if their
        # algorithms were disabled, but without waiting for our handlers, whose calls would then pile up.
        ("grpc.per_message_decompression", 0),
        # Of a message that nobody reads yet, gRPC holds this much; probing would enlarge it.
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # By default a connection that has sent large messages keeps a buffer of 1.5 MiB.
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BYTES),
        ("grpc.max_concurrent_streams", max(MIN_STREAMS, 2 * (config.max_num_seqs + config.max_queue))),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES),
        # A client's pings keep long unary calls alive. One that pings faster all the time loses its connection.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 16),
        # Ours find clients whose machine is gone, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Calls under way have no limit: that is gRPC's default.
        *([("grpc.max_connection_age_ms", age)] if age else []),
    ]


def _start_poller() -> None:
    """Start gRPC's own thread, which hears that a message was written, so that it takes no processor from others.

    Each write wakes it. By default it would then interrupt our thread, which has the other streams' messages still to
    write: that is a quarter of what a message costs (bench/serving/stream_cost.py). As a batch thread it takes an idle
    processor or waits its turn, and its slice is longer than ours, which is the usual one: with a shorter one the core
    would come sooner, and go as soon. gRPC offers no setting for it, but a thread inherits the policy and the slice of
    who starts it.
    """
    if sys.platform != "linux":
        return  # gRPC starts it with the server
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    short_slice.ask_for_it(POLLER_SECONDS)  # kept through the changes of policy
    with contextlib.suppress(OSError):  # a sandbox forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]
        finally:
            os.sched_setscheduler(0, policy, parameters)
    short_slice.ask_for_it(0)


async def serve(args: FrontendArgs) -> None:
    """Serve until an order to drain or SIGTERM. ConfigError if the port, the model's folder or
    another file is unusable."""
    loop = asyncio.get_running_loop()
    leave: asyncio.Future[float] = loop.create_future()
    folder: asyncio.Future[Path] = loop.create_future()

    def drain(seconds: float) -> None:
        if not leave.done():
            leave.set_result(seconds)

    def obey(order: dict[str, Any]) -> None:
        if "drain" in order:
            drain(order["drain"])
        elif not folder.done():
            folder.set_result(Path(order["folder"]))

    def from_thread(order: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: leaving already
            loop.call_soon_threadsafe(obey, order)

    if args.folder is not None:
        folder.set_result(Path(args.folder))
    loop.add_signal_handler(signal.SIGTERM, drain, args.config.drain_seconds)
    child.listen(from_thread)
    _start_poller()
    frontend = Frontend(args)
    child.report("listening", port=await frontend.start())

    async def load() -> None:
        await frontend.load(await folder)
        frontend.warm()

    loading = asyncio.ensure_future(load())
    try:
        await asyncio.wait((loading, leave), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await leave
        logs.event(log, "draining", drain_seconds=leave.result())
    finally:
        loading.cancel()
        await frontend.stop(leave.result() if leave.done() else 0.0)


def _return_large_blocks() -> None:
    """Have glibc give freed blocks of LARGE_BLOCK_BYTES back to the system at once. By default it keeps what was freed
    after the first large message for the next ones."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the supervisor's
    args = child.read_arguments(FrontendArgs)
    process_control.set_dumpable(args.config.debuggable)
    logs.setup(args.config, f"frontend-{args.index}")
    _return_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        # Not asyncio.run, whose end waits for the threads that still tokenize.
        asyncio.new_event_loop().run_until_complete(serve(args))
    except ConfigError as error:
        return child.unusable(error)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the interpreter's end would wait for threads
