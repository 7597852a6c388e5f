"""Front-end process: gRPC clients on one side, the engine's socket on the other. It has no device and no torch.

    python -m npuserve.service.frontend.process      started by the supervisor, which writes FrontendArgs to its stdin

It listens and answers health checks at once, while the supervisor downloads the model, a thread loads the tokenizer and
the engine process loads the model.

An order of the supervisor, or SIGTERM, starts a drain (drain.py). Calls that still run at its end get UNAVAILABLE, with
RetryInfo and their resume token. Then the process exits with code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.service import clock, logs
from npuserve.service.access.peer_process import LOOPBACK
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.errors import Unavailable
from npuserve.service.frontend.admin import AdminServicer
from npuserve.service.frontend.drain import Drain
from npuserve.service.frontend.generation import Generation
from npuserve.service.frontend.inference import InferenceServicer
from npuserve.service.frontend.pooling import PooledCalls
from npuserve.service.frontend.server import MessageLimit, Servers, Servicers
from npuserve.service.processes import child, process_control
from npuserve.service.requests.preparation import Preparation
from npuserve.service.rpc import poller
from npuserve.service.rpc.connection_guard import strangers_share
from npuserve.service.rpc.health import HealthServicer
from npuserve.service.streams.engine_client import EngineClient
from npuserve.service.text.answer_format import PLAIN
from npuserve.service.text.model_folder import ModelFolder, open_folder

if TYPE_CHECKING:  # imported at run time only if configured, since the process must start in under a second
    from npuserve.service.access.api_keys import Keys
    from npuserve.service.access.file_reloader import FileReloader
    from npuserve.service.access.tls import Tls
    from npuserve.service.gateway.servicer import VllmEngineServicer
    from npuserve.service.rpc.tracing import Tracing

log = logging.getLogger("npuserve.service.frontend.process")

HEARTBEAT_SECONDS = 0.5
STALL_SHARE = 0.5
"""Share of hang_seconds after which a silent engine gets no new requests. Its requests are kept: it may recover."""

TEMPLATE_RETRY_SECONDS = 1.0
"""Pause after a process of the chat template that the system did not start, or killed."""

SWITCH_SECONDS = 0.0005
"""Interval after which a thread that prepares a request releases the interpreter lock to the event loop. With the
default, each iteration of the loop would wait 5 ms."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 256 << 10
MAX_OTHER_FILES = 256
"""Open files of a front end besides its connections."""


class FrontendArgs(msgspec.Struct, frozen=True):
    """Arguments of a front-end process.

    config: configuration of the server.
    index: number of the front end, from 0.
    engine_address: address of the engine's socket.
    port: port to listen on; 0: a free port.
    heartbeat: True to send heartbeats.
    folder: the model's folder; None while it is downloaded: an order with the folder follows.
    last_good: private folder for copies of valid settings files; "": no copies.
    start_date: Unix time of the server's start, in seconds; 0: now.
    started: time.monotonic() seconds of the server's start; 0: now.
    gateway_port: port on 127.0.0.1 for the process of the OpenAI API; 0: a free port; -1: none.
    gateway_pid: id of that process; 0: it does not run yet: an order with the id follows.
    """

    config: ServerConfig
    index: int
    engine_address: str
    port: int
    heartbeat: bool = False
    folder: str | None = None
    last_good: str = ""
    start_date: float = 0.0
    started: float = 0.0
    gateway_port: int = -1
    gateway_pid: int = 0


class Frontend:
    """gRPC servers and the connection to the engine. Call `start`, then `stop`, each once, on one event loop.

    Raises ConfigError if the TLS files or the API keys are unusable.
    """

    def __init__(self, args: FrontendArgs):
        config = self._config = args.config
        self._heartbeat = child.Heartbeat(args.heartbeat)
        self._tls = _open_tls(config)
        self._keys = keys = _open_keys(config, args.last_good)
        self._reloads: list[Callable[[], object]] = [
            *([self._tls.refresh] if self._tls else []), *([keys.reload_if_changed] if keys else [])]
        self._engine = EngineClient(
            args.engine_address, lambda state: self._update_readiness(), config.hang_seconds * STALL_SHARE,
            resume_seconds=config.resume_seconds, max_buffered_tokens=config.max_buffered_tokens,
            slow_reader_seconds=config.slow_reader_seconds, stream_interval=config.stream_interval,
            has_kv_events=config.kv_events != "off", profile_dir=config.profile_dir)
        self._tracing = _open_tracing(config)
        self._preparation = Preparation(config.max_preparing)
        self._generation = Generation(config, self._engine, self._preparation)
        pooled = PooledCalls(self._engine, self._generation)
        vllm_engine = _open_vllm_engine(config, self._engine, self._generation, pooled, self._tracing)
        start_date = args.start_date or clock.unix_time()
        self._health = HealthServicer([vllm_engine.NAME] if vllm_engine else [])
        self._servers = Servers(
            config, args.port,
            Servicers(InferenceServicer(config, self._engine, self._generation, pooled, start_date, self._tracing),
                      AdminServicer(config, self._engine, args.started or time.monotonic()), self._health, vllm_engine),
            MessageLimit(config, args.folder, self._engine, self._generation), self._preparation,
            (lambda key: keys.value.find(key)) if keys else None, self._tls.credentials if self._tls else None,
            args.gateway_port)
        self.admit_gateway(args.gateway_pid)

    @property
    def gateway_port(self) -> int:
        """Return the port for the process of the OpenAI API; -1: there is none."""
        return self._servers.gateway_port

    def admit_gateway(self, pid: int) -> None:
        """Accept calls of this process on `gateway_port`, and of no other."""
        self._servers.gateway_process.pid = pid

    async def start(self) -> int:
        """Listen; return the port. Raises ConfigError if a port is not available."""
        port = await self._servers.start()
        self._engine.start()
        self._beating = asyncio.ensure_future(self._beat())
        return port

    async def load(self, folder: Path) -> None:
        """Load the model's tokenizer and compile its chat template, in a thread.

        Raises ConfigError if the folder is unusable.
        """

        def work() -> ModelFolder:
            import npuserve.service.text.detokenizer  # noqa: F401  imported now, so that the first request is fast

            return open_folder(folder, self._config.model, self._config.served_name, self._config.task)

        opened = await asyncio.to_thread(work)
        chat = opened.tokenizer.chat if opened.tokenizer else None
        while chat:
            try:
                await asyncio.to_thread(chat.start)
                break
            except Unavailable as error:
                logs.event(log, "the chat template is not compiled yet", level=logging.WARNING, error=str(error))
                await asyncio.sleep(TEMPLATE_RETRY_SECONDS)
        self._generation.folder = opened
        self._servers.guard.start_baseline()
        self._update_readiness()

    async def stop(self, seconds: float | None = None) -> None:
        """Refuse new calls, let running calls end for `seconds` (None: drain_seconds), and stop."""
        drain = Drain(self._servers, self._config.drain_seconds if seconds is None else seconds)
        self._generation.is_draining = True
        self._health.drain()
        self._engine.kv_events.close(Unavailable("the server is draining"))
        await drain.wait()
        self._preparation.fail_all(
            Unavailable("the server shut down before the request was prepared, at the end of drain_seconds"))
        self._engine.fail_all(
            Unavailable("the server shut down before the end of the answer, at the end of drain_seconds; its output is "
                        "lost"))
        await self._engine.close()
        await drain.stop()
        self._beating.cancel()
        self._preparation.close()
        if self._tracing:
            self._tracing.close()  # not in a thread of the loop's pool: all may be waiting for the chat template

    def end_streams(self) -> None:
        """End all streams: the engine has failed during the drain and is not restarted."""
        self._engine.fail_all(Unavailable("the engine failed in the drain and is not restarted; the output is lost"))

    async def _beat(self) -> None:
        """Send heartbeats to the supervisor, and reload settings files that have changed."""
        while True:
            self._heartbeat.beat()
            for reload in self._reloads:
                try:
                    reload()
                except Exception as error:  # a bug in the reader of a file must not stop the heartbeat
                    logs.bug(log, "settings file not read again", error)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _update_readiness(self) -> None:
        """Set readiness from the states of the engine and the tokenizer."""
        ready = self._engine.state == "ready" and self._generation.folder is not None
        self._health.set_ready(ready)
        if ready and self._generation.folder:
            chat = self._generation.folder.tokenizer and self._generation.folder.tokenizer.chat
            answers = chat.format if chat else PLAIN
            child.report("ready", reasoning=answers.has_reasoning, tool_calls=answers.has_tool_calls,
                         tagged_arguments=answers.has_tagged_arguments)


def _open_tls(config: ServerConfig) -> Tls | None:
    if not config.tls_cert:
        return None
    from npuserve.service.access.tls import Tls

    return Tls(config)


def _open_keys(config: ServerConfig, last_good: str) -> FileReloader[Keys] | None:
    if not config.api_keys:
        return None
    from npuserve.service.access import api_keys as keys
    from npuserve.service.access.file_reloader import FileReloader
    from npuserve.service.access.last_known_good import LastKnownGoodFile

    if not (config.tls_cert or config.host == LOOPBACK):
        logs.event(log, "API keys are sent unencrypted: TLS is off", level=logging.WARNING)
    copy = Path(last_good) / "api_keys" if last_good else None
    file = LastKnownGoodFile("api_keys", config.api_keys, copy, keys.read)
    return FileReloader("api_keys", [config.api_keys], file.read, file.read_copy)


def _open_tracing(config: ServerConfig) -> Tracing | None:
    """Return None if tracing is off. OpenTelemetry is not imported then.

    Raises ConfigError if OpenTelemetry is not installed, or refuses its environment variables.
    """
    if not config.otlp_endpoint:
        return None
    try:
        from npuserve.service.rpc.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: {error}; pip install 'npuserve[otel]'") from None
    try:
        return Tracing(config.otlp_endpoint)
    except Exception as error:  # OpenTelemetry raises several classes for the values of its variables
        raise ConfigError(f"otlp_endpoint: OpenTelemetry refuses a variable OTEL_…: {error}") from None


def _open_vllm_engine(
    config: ServerConfig, engine: EngineClient, generation: Generation, pooled: PooledCalls, tracing: Tracing | None
) -> VllmEngineServicer | None:
    """Return None, without an import, if the extra `gateway` is not installed; also if its stubs cannot be used.

    Raises ConfigError in both cases if a setting needs it: KV events over gRPC, or the OpenAI API.
    """
    needed_by = "kv_events: grpc" if config.kv_events == "grpc" else "openai_port" if config.openai_port else ""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        if needed_by:
            raise ConfigError(f"{needed_by} needs smg-grpc-proto; pip install 'npuserve[gateway]'")
        return None
    try:
        from npuserve.service.gateway.servicer import VllmEngineServicer
    except Exception as error:  # generated code raises several classes for the versions of grpcio and protobuf
        if needed_by:
            reason = f"{needed_by} needs smg-grpc-proto, and the installed one cannot be used: {error}"
            raise ConfigError(reason) from None
        logs.event(log, "VllmEngine is off: the installed smg-grpc-proto cannot be used", level=logging.WARNING,
                   error=str(error))
        return None
    return VllmEngineServicer(config, engine, generation, pooled, time.monotonic(), tracing)


async def serve(args: FrontendArgs) -> None:
    """Serve until SIGTERM or an order to drain.

    Raises ConfigError if a port, the model's folder or another file is unusable.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(end_without_memory)
    draining: asyncio.Future[float] = loop.create_future()
    folder: asyncio.Future[Path] = loop.create_future()

    def drain(seconds: float) -> None:
        if not draining.done():
            draining.set_result(seconds)

    def handle(order: dict[str, Any]) -> None:
        if "drain" in order:
            drain(order["drain"])
        elif "engine_failed" in order:
            frontend.end_streams()
        elif "gateway_pid" in order:
            frontend.admit_gateway(order["gateway_pid"])
        elif not folder.done():
            folder.set_result(Path(order["folder"]))

    def handle_in_loop(order: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is exiting
            loop.call_soon_threadsafe(handle, order)

    if args.folder is not None:
        folder.set_result(Path(args.folder))
    loop.add_signal_handler(signal.SIGTERM, drain, args.config.drain_seconds)
    child.listen(handle_in_loop)
    poller.start()
    frontend = Frontend(args)
    port = await frontend.start()
    child.report("listening", port=port, gateway_port=frontend.gateway_port)

    async def load() -> None:
        await frontend.load(await folder)

    loading = asyncio.ensure_future(load())
    try:
        await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await draining
        logs.event(log, "draining", drain_seconds=draining.result())
    finally:
        loading.cancel()
        await frontend.stop(draining.result() if draining.done() else 0.0)


_NO_MEMORY = b"the front end has no memory, and ends\n"


def end_without_memory(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process if a callback of the event loop had no memory.

    The callback is lost, such as one that wakes a call, which could wait forever. The supervisor starts another
    process, where clients resume their streams.
    """
    if not isinstance(context.get("exception"), MemoryError):
        loop.default_exception_handler(context)
        return
    try:
        os.write(2, _NO_MEMORY)  # a log record would need memory
    finally:
        os._exit(1)


def _return_large_blocks() -> None:
    """Make glibc return freed blocks of LARGE_BLOCK_BYTES to the system at once.

    By default it keeps blocks that are freed after the first large message.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def _allow_open_files(connections: int) -> None:
    """Raise the limit of open files, as far as the system allows, to what the connections of both ports need."""
    needed = 2 * (connections + strangers_share(connections)) + MAX_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def main() -> int:
    """Run a front-end process; return its exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal; the supervisor handles them
        signal.signal(number, signal.SIG_IGN)
    args = child.read_arguments(FrontendArgs)
    process_control.set_dumpable(args.config.debuggable)
    logs.setup(args.config, f"frontend-{args.index}")
    _return_large_blocks()
    _allow_open_files(args.config.max_connections)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        # Not asyncio.run, which would wait at its end for threads that still tokenize.
        asyncio.new_event_loop().run_until_complete(serve(args))
    except ConfigError as error:
        return child.report_unusable(error)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the interpreter would wait for threads at its end
