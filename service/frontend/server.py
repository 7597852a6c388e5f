"""gRPC servers of a front end: services, channel options, listening ports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.service import probe
from npuserve.service.access.auth import AuthInterceptor, GatewayInterceptor
from npuserve.service.access.caller import Caller
from npuserve.service.access.peer_process import LOOPBACK, PeerProcess
from npuserve.service.config import MAX_MESSAGE_BYTES, ConfigError, ServerConfig, endpoint
from npuserve.service.frontend import reflection
from npuserve.service.frontend.admin import AdminServicer
from npuserve.service.frontend.generation import Generation
from npuserve.service.frontend.inference import InferenceServicer
from npuserve.service.requests import message_limits
from npuserve.service.requests.intake import Intake
from npuserve.service.requests.parser import ParsingServer
from npuserve.service.requests.preparation import Preparation
from npuserve.service.requests.reader import WINDOW_BYTES, RequestReader
from npuserve.service.rpc import aio_server
from npuserve.service.rpc.connection_guard import ConnectionGuard, strangers_share
from npuserve.service.rpc.connections import Connections
from npuserve.service.rpc.health import HealthServicer
from npuserve.service.rpc.refusal_throttle import RefusalThrottle
from npuserve.service.streams.engine_client import EngineClient
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2, inference_service_pb2_grpc

if TYPE_CHECKING:
    from npuserve.service.gateway.servicer import VllmEngineServicer

READ_BUFFER_BYTES = 64 << 10
"""Maximum read buffer of a connection."""
MIN_CONCURRENT_STREAMS = 256
"""Concurrent calls that a connection may have at least, also where `max_num_seqs` and `max_queue` are small."""
METADATA_BYTES = 8 << 10
"""Metadata of a call. gRPC refuses larger metadata at random, and always above twice this size."""
MAX_SMALL_INTAKE_BYTES = 8 << 20
"""Memory of incomplete messages of health and of reflection, which have at most a few KiB each."""
MAX_METADATA_BYTES = 2 * METADATA_BYTES
LISTEN_RETRY_SECONDS = 0.02
GATEWAY_CALLER = "openai:"
"""Name of the process of the OpenAI API as a caller. Names of API keys have no colon."""

SERVICES: tuple[str, ...] = (
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
)


@dataclass(frozen=True)
class Servicers:
    """Servicers of one front end.

    vllm_engine: None: the extra `gateway` is not installed.
    """

    inference: InferenceServicer
    admin: AdminServicer
    health: HealthServicer
    vllm_engine: VllmEngineServicer | None = None


class MessageLimit:
    """Size limit of request messages, from the settings and the model.

    max_bytes: bytes of a message that the channel accepts. The channel exists before the tokenizer is loaded.
    """

    def __init__(self, config: ServerConfig, model_folder: str | None, engine: EngineClient,
                 generation: Generation):
        self.max_bytes = _max_message_bytes(config, model_folder)
        self._is_fixed = bool(config.max_message_size)
        self._engine = engine
        self._generation = generation

    def bytes_for(self, kind: Descriptor) -> int:
        """Return the bytes that a request message of this type may have now."""
        info = self._engine.model_info
        folder = self._generation.folder
        if self._is_fixed or info is None or folder is None:
            return self.max_bytes
        token_bytes = folder.tokenizer.max_token_bytes if folder.tokenizer else 1
        return message_limits.limit_of(kind, info.max_model_len, token_bytes, info.vocabulary_size)


class Servers:
    """gRPC servers of one front end: all services on `port`, health alone on the setting `health_port`, and VllmEngine
    for the process of the OpenAI API on `gateway_port` of 127.0.0.1.

    A drain replaces the server of `port` by a second one with the same services.

    port: port to listen on; 0: a free port, known after `start`.
    find_key: see AuthInterceptor.
    make_credentials: returns credentials for one attempt to listen on `port`; None: no TLS.
    gateway_port: 0: a free port, known after `start`; -1: none.

    gateway_process: the process of the OpenAI API.
    """

    def __init__(
        self, config: ServerConfig, port: int, servicers: Servicers, limit: MessageLimit, preparation: Preparation,
        find_key: Callable[[str], Caller | None] | None, make_credentials: Callable[[], grpc.ServerCredentials] | None,
        gateway_port: int = -1,
    ):
        self.port = port
        self.gateway_port = gateway_port
        self.connections = Connections()
        self.gateway_process = PeerProcess(lambda: self.gateway_port)
        self.guard = ConnectionGuard(
            self.connections, config.max_connections, lambda: (self.port, config.health_port, self.gateway_port))
        self._config = config
        self._servicers = servicers
        self._limit = limit
        self._preparation = preparation
        self._make_credentials = make_credentials
        self._interceptor = AuthInterceptor(
            find_key, config.admin_names, RefusalThrottle(config.max_refusals_per_second), MAX_METADATA_BYTES,
            self.guard.close_for_metadata)
        # A tenant of its own where callers have keys.
        self._gateway_caller = Caller(GATEWAY_CALLER, is_authenticated=find_key is not None)
        # Each intake has its own reader, so that its messages do not wait for messages of other services.
        self._intake = self._make_intake(limit.max_bytes)
        self._health_intake, self._reflection_intake = (
            self._make_intake(limit.max_bytes, MAX_SMALL_INTAKE_BYTES) for _ in range(2))
        self._servers = [self._make_server()]

    async def start(self) -> int:
        """Listen; return the port. Raises ConfigError if a port is not available."""
        (server,) = self._servers
        self.port = self._listen(server)
        await server.start()
        if self._config.health_port:
            server = self._make_health_server()
            address = endpoint(self._config.host, self._config.health_port)
            _add_port("health_port", address, server.add_insecure_port)
            await server.start()
            self._servers.append(server)
        if self.gateway_port >= 0:
            server = self._make_gateway_server()
            try:
                self.gateway_port = _add_port(
                    "openai_port", endpoint(LOOPBACK, self.gateway_port), server.add_insecure_port)
            except ConfigError:  # another process has taken it since the last front end
                self.gateway_port = _add_port("openai_port", endpoint(LOOPBACK, 0), server.add_insecure_port)
            await server.start()
            self._servers.append(server)
        self.guard.start()
        return self.port

    async def replace(self, grace_seconds: float) -> None:
        """Send GOAWAY on the connections of `port`, and accept new connections with a second gRPC server.

        Calls of the first server may run for `grace_seconds`. Returns when it has stopped.
        """
        stopping = asyncio.ensure_future(self._servers[0].stop(grace_seconds))
        server = self._make_server()
        try:
            while True:
                with contextlib.suppress(ConfigError, OSError):  # OSError: no descriptor is free
                    if self._config.frontends > 1 or not _is_taken(self._config.host, self.port):
                        self._listen(server)
                        break
                await asyncio.sleep(LISTEN_RETRY_SECONDS)  # until the first server has released the port
            self._servers.append(server)
            await _start(server)
            await stopping
        finally:
            stopping.cancel()

    async def stop(self, timeout_seconds: float) -> None:
        """Stop all servers and cancel their calls. Wait for gRPC at most `timeout_seconds`."""
        stopping = [asyncio.ensure_future(server.stop(None)) for server in self._servers]
        await asyncio.wait(stopping, timeout=timeout_seconds)
        self.guard.stop()

    def _make_intake(self, max_bytes: int, max_incomplete_bytes: int | None = None) -> Intake:
        reader = RequestReader(self.connections.sockets, max_bytes, max_incomplete_bytes)
        return Intake(reader, self._preparation, self._limit.bytes_for)

    def _make_server(self) -> grpc.aio.Server:
        """Return a server of all services, which does not listen yet."""
        server = aio_server.server([self._interceptor], _channel_options(self._config, self._limit.max_bytes))
        parsing = ParsingServer(server, self._intake.message, self.connections.begin)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicers.inference, parsing)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self._servicers.admin, parsing)
        health_pb2_grpc.add_HealthServicer_to_server(
            self._servicers.health, ParsingServer(
                server, self._health_intake.message, partial(self.connections.begin, is_accepted=False)))
        services = SERVICES
        if self._servicers.vllm_engine:
            self._servicers.vllm_engine.add_to(parsing)
            services = (*services, self._servicers.vllm_engine.NAME)
        # A drain does not wait for a reflection stream, which a client may keep open.
        reflection.add_reflection(services, ParsingServer(server, self._reflection_intake.message))
        return server

    def _make_gateway_server(self) -> grpc.aio.Server:
        """Return a server of VllmEngine for the process of the OpenAI API, which does not listen yet."""
        assert self._servicers.vllm_engine is not None
        interceptor = GatewayInterceptor(
            self.gateway_process.holds, self._gateway_caller, RefusalThrottle(self._config.max_refusals_per_second),
            MAX_METADATA_BYTES, self.guard.close_for_metadata)
        server = aio_server.server(
            [interceptor], [*_channel_options(self._config, self._limit.max_bytes), ("grpc.so_reuseport", 0)])
        self._servicers.vllm_engine.add_to(
            ParsingServer(server, self._intake.message, self.connections.begin))
        return server

    def _make_health_server(self) -> grpc.aio.Server:
        """Return a server of health alone, without authentication, which does not listen yet."""
        max_bytes = message_limits.SMALL_BYTES
        server = aio_server.server([], _channel_options(self._config, max_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(
            self._servicers.health, ParsingServer(server, self._make_intake(max_bytes, MAX_SMALL_INTAKE_BYTES).message))
        return server

    def _listen(self, server: grpc.aio.Server) -> int:
        """Bind the server to `port`, and return the port.

        Raises ConfigError if the port is not available, or if gRPC cannot use the credentials.
        """
        address = endpoint(self._config.host, self.port)
        if self._make_credentials is None:
            return _add_port("port", address, server.add_insecure_port)
        credentials = self._make_credentials()
        try:
            return _add_port("port", address, lambda address: server.add_secure_port(address, credentials))
        except ConfigError:
            # Several front ends share the port, which a probe would then find taken.
            if probe.cannot_listen(self._config.host, self.port if self._config.frontends == 1 else 0):
                raise
            raise ConfigError("tls_cert: gRPC cannot listen with this certificate and its key") from None


async def _start(server: grpc.aio.Server) -> None:
    """Start `server`. A cancellation waits for that, since gRPC's cancelled start leaves a failed server."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        raise


def _add_port(setting: str, address: str, add: Callable[[str], int]) -> int:
    """Bind a server to an address, and return the port. setting: name of the port's setting, for the error."""
    try:
        return add(address)
    except RuntimeError as error:
        raise ConfigError(f"{setting}: cannot listen on {address}; is it in use?") from error


def _is_taken(host: str, port: int) -> bool:
    """Return whether a socket listens on the port. gRPC logs an error for each failed attempt to listen."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            continue  # the system has no IPv6
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def _max_message_bytes(config: ServerConfig, model_folder: str | None) -> int:
    """Return the bytes of the largest message that a model of this context length can need.

    MAX_MESSAGE_BYTES if the context length is not known yet.
    """
    if config.max_message_size:
        return config.max_message_size
    context = config.max_model_len
    if not context and model_folder is not None:
        with contextlib.suppress(ModelError, OSError, ValueError):  # the engine reports what is wrong with the folder
            context = ModelConfig.from_folder(model_folder, task=config.task).context_length
    return message_limits.max_message_bytes(context) if context else MAX_MESSAGE_BYTES


def _channel_options(config: ServerConfig, max_request_bytes: int) -> list[tuple[str, int]]:
    age = math.ceil(config.max_connection_age_seconds * 1000)
    return [
        ("grpc.so_reuseport", int(config.frontends > 1)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_request_bytes),
        # intake.py refuses compressed messages, whose few KiB may expand to MiBs. gRPC would refuse them itself if the
        # algorithms were disabled. But it would not wait for our handlers, so that their calls would accumulate.
        ("grpc.per_message_decompression", 0),
        # Bytes of an unread message that gRPC buffers. BDP probing would enlarge the buffer.
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # By default, a connection that has sent large messages keeps a buffer of 1.5 MiB.
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BUFFER_BYTES),
        ("grpc.max_concurrent_streams", max(MIN_CONCURRENT_STREAMS, 2 * (config.max_num_seqs + config.max_queue))),
        # The guard of the connections closes others before gRPC refuses new ones.
        ("grpc.max_allowed_incoming_connections", config.max_connections + strangers_share(config.max_connections)),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Clients may ping to keep long unary calls alive. A client that keeps pinging faster is disconnected.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 16),
        # The server's pings detect clients whose machine is down, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Without max_connection_age_grace_ms (gRPC's default), calls of an aged connection may run without limit.
        *([("grpc.max_connection_age_ms", age)] if age else []),
    ]
