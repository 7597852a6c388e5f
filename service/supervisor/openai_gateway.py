"""The OpenAI API of one server: smg in a process of its own, between HTTP clients and the server's front ends.

smg (docs/gateway.md) reaches servers in plaintext and without a key. So each front end has a second port on 127.0.0.1,
which accepts calls of that process alone (access/peer_process.py). smg ends TLS and checks the keys of
`openai_api_keys`.

The supervisor starts it once the server is ready, since smg looks for a server that is not ready only every 30 s. It is
restarted for ever: gRPC clients are not affected by it. A drain ends it first.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from npuserve.service import logs
from npuserve.service.config import MAX_MESSAGE_BYTES, ConfigError, ServerConfig, endpoint
from npuserve.service.supervisor.child_process import ChildProcess
from npuserve.service.supervisor.restart_policy import Restarts, RunEnd, Why

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "npuserve.service.gateway.smg_process")
NAME = "openai"
LOOPBACK = "127.0.0.1"
OPENAI_STOP_SECONDS = 10.0
"""Time of smg from the end of its last request to its exit: it waits for its own parts, 2.5 s on a quiet machine."""
METRICS_SECONDS = 1.0
CALL_PARSERS = {(True, True): "qwen_xml", (True, False): "qwen"}
"""(tool calls, tagged arguments) of an answer's format -> smg's parser."""
NO_PARSER = "passthrough"

RETRIES = ("--retry-max-retries=4", "--retry-initial-backoff-ms=1000", "--retry-backoff-multiplier=1.5",
           "--retry-max-backoff-ms=3000")
"""Four tries within about 5 s before the first token, the first after the second that RetryInfo names: an engine that
restarts is ready again, and a full queue is not asked five times at once."""
ONE_SERVER = ("--policy=round_robin", "--disable-circuit-breaker", "--disable-worker-overload-protection",
              "--worker-wedge-secs=86400", "--health-check-interval-secs=5", "--request-timeout-secs=86400")
"""All front ends share one engine. What would keep requests from a slow server would only refuse them here."""


def read_keys(path: str) -> list[str]:
    """Return the lines NAME:KEY of a file, without comments and empty lines. Raises ConfigError."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"openai_api_keys: {path} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        if not re.fullmatch(r"[\w.-]+:[!-~]{8,}", line):
            raise ConfigError(f"openai_api_keys: line {number} of {path} is not NAME:KEY, with a key of at least 8 "
                              "visible ASCII characters")
        keys.append(line)
    if not keys:
        raise ConfigError(f"openai_api_keys: {path} has no key; write lines NAME:KEY")
    names = [line.partition(":")[0] for line in keys]
    if len(set(names)) < len(names):
        raise ConfigError(f"openai_api_keys: a name occurs twice in {path}")
    return keys


class OpenAIGateway:
    """smg for one server. `run` it as a task once the server is ready.

    on_start: called with the id of each new process before it connects.
    on_failure: called with the reason of each end that is followed by a restart.

    ready: set while HTTP clients get answers.
    child: the process.

    Raises ConfigError if smg is not installed, or if the file of keys is unusable. The file is read once.
    """

    def __init__(
        self, config: ServerConfig, environment: Mapping[str, str], restarts: Restarts,
        on_start: Callable[[int], None], on_failure: Callable[[Why], None],
    ):
        for module in ("smg", "smg_grpc_proto"):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"openai_port: {module} is not installed; pip install 'npuserve[gateway]'")
        self._keys = read_keys(config.openai_api_keys) if config.openai_api_keys else []
        self.ready = asyncio.Event()
        self.child = ChildProcess(NAME, PROGRAM, environment, self._arguments, self._on_event)
        self._config = config
        self._restarts = restarts
        self._on_start = on_start
        self._on_failure = on_failure
        self._ports: dict[str, int] = {}  # front end -> port of its listener
        self._format: Mapping[str, bool] = {}
        self._metrics_port = 0

    @property
    def url(self) -> str:
        """Base URL for clients."""
        scheme = "https" if self._config.tls_cert else "http"
        return f"{scheme}://{endpoint(self._config.host, self._config.openai_port)}/v1"

    def frontend_listens(self, name: str, port: int) -> None:
        """Take the port of a front end. smg is started again if it knows another one."""
        known = self._ports.get(name)
        self._ports[name] = port
        if known not in (None, port) and self.child.is_running:
            self.child.kill_hung()

    def port_of(self, name: str) -> int:
        """Return the port that a front end had before; 0: none yet."""
        return self._ports.get(name, 0)

    def answers_have(self, answer_format: Mapping[str, bool]) -> None:
        """Take the format of the model's answers: reasoning, tool_calls, tagged_arguments."""
        self._format = answer_format

    async def run(self) -> None:
        """Run smg, and start it again whenever it ends, until it is stopped."""
        failures = 0
        while True:
            self.ready.clear()
            code: int | Exception
            try:
                code = await self.child.run()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread for its end can be started
                code = error
            if self.child.stopping.is_set():
                return
            was_ready = self.ready.is_set()
            failures = 0 if was_ready else failures + 1
            pause = self._restarts.crash_pause if was_ready else self._restarts.retry_pause(failures)
            self._on_failure(RunEnd(code, is_hung=self.child.is_hung).why)
            logs.event(log, "openai died, starting it again", level=logging.WARNING, code=str(code), pause=pause)
            try:
                await asyncio.wait_for(self.child.stopping.wait(), pause)
                return
            except asyncio.TimeoutError:
                continue

    def metrics(self) -> str:
        """Return smg's page of metrics; "" while it has none. Called by the thread of the metrics page."""
        import urllib.request  # slow to import, and needed with openai_port only

        if not self._metrics_port or not self.ready.is_set():
            return ""
        try:
            with urllib.request.urlopen(
                    f"http://{LOOPBACK}:{self._metrics_port}/metrics", timeout=METRICS_SECONDS) as page:
                text: str = page.read().decode()
        except (OSError, ValueError):
            return ""
        return text if text.endswith("\n") else f"{text}\n"

    def _on_event(self, child: ChildProcess, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self.ready.set()
            logs.event(log, f"OpenAI API on {self.url}")

    def _arguments(self) -> dict[str, object]:
        """Return the first line for the process that has just started."""
        self._on_start(self.child.pid)
        self._metrics_port = _free_port()
        config = self._config
        has_calls = self._format.get("tool_calls", False)
        call_parser = CALL_PARSERS.get((has_calls, has_calls and self._format["tagged_arguments"]), NO_PARSER)
        host = _address(config.host)
        arguments = [
            f"--host={host}", f"--port={config.openai_port}",
            f"--prometheus-host={LOOPBACK}", f"--prometheus-port={self._metrics_port}",
            "--worker-urls", *(f"grpc://{LOOPBACK}:{port}" for port in self._ports.values()),
            *ONE_SERVER, *RETRIES,
            f"--reasoning-parser={'qwen3' if self._format.get('reasoning') else NO_PARSER}",
            f"--tool-call-parser={call_parser}",
            f"--shutdown-grace-period-secs={math.ceil(config.drain_seconds)}",
            f"--max-payload-size={MAX_MESSAGE_BYTES}",
            # Nobody else administers it: it would add servers, and answer with their output.
            "--control-plane-api-keys", f"supervisor:npuserve:admin:{secrets.token_hex(32)}"]
        if config.tls_cert:
            arguments += [f"--tls-cert-path={config.tls_cert}", f"--tls-key-path={config.tls_key}"]
        for line in self._keys:
            arguments += ["--tenant-api-key", line]
        return {"config": config, "arguments": arguments, "host": host, "port": config.openai_port}


def _address(host: str) -> str:
    """Return the address of a host, as smg needs it."""
    addresses = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return str(addresses[0][4][0])


def _free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
