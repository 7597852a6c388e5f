"""Process of smg, the gateway that serves the OpenAI API in front of this server's own front ends.

    python -m npuserve.service.gateway.smg_process      started by the supervisor, which writes SmgArgs to its stdin

smg runs in this process, so that its keys are not in a command line. What it logs goes to the server's log. A thread
asks its HTTP port whether it lives, and sends the supervisor a heartbeat for each answer.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import os
import resource
import ssl
import sys
import threading
import time

import msgspec

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.processes import child

log = logging.getLogger("npuserve.service.gateway.smg_process")

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
"""Time for an answer. The supervisor counts the silence."""
NOT_LOGGED = ("smg::posture", "smg::routers::grpc::multimodal")
"""Parts of smg that warn at each start of what the supervisor has decided, and of images, which are refused."""
LOGGED_FIELDS = ("error", "reason", "url", "worker_url", "status_code", "function")


class SmgArgs(msgspec.Struct, frozen=True):
    """Arguments of the process.

    config: configuration of the server.
    arguments: of `smg launch`, without those of its log.
    host, port: address and port of its HTTP API.
    """

    config: ServerConfig
    arguments: list[str]
    host: str
    port: int


def _connect(args: SmgArgs) -> http.client.HTTPConnection:
    """Return a connection to smg's own port, which is not opened yet."""
    address = ipaddress.ip_address(args.host)
    host = {4: "127.0.0.1", 6: "::1"}[address.version] if address.is_unspecified else args.host
    if not args.config.tls_cert:
        return http.client.HTTPConnection(host, args.port, timeout=ANSWER_SECONDS)
    context = ssl.create_default_context()
    context.check_hostname = False  # the certificate names the server's public host
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, args.port, timeout=ANSWER_SECONDS, context=context)


def _is_ok(args: SmgArgs, path: str) -> bool:
    """Return whether a GET has status 200."""
    connection = _connect(args)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _watch(args: SmgArgs, heartbeat: child.Heartbeat) -> None:
    """Report a heartbeat for each answer of smg, and once that it is ready."""
    is_ready = False
    while True:
        if _is_ok(args, "/liveness"):
            heartbeat.beat()
        if not is_ready and _is_ok(args, "/readiness"):
            is_ready = True
            child.report("ready")
        time.sleep(POLL_SECONDS)


def _log_lines(descriptor: int) -> None:
    """Log the lines that smg writes, one JSON object each. Other lines, such as its banner, are dropped."""
    with open(descriptor, "rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                target = record["target"]
                message = record["message"]
                level = record["level"]
            except (ValueError, TypeError, KeyError):
                continue
            if target not in NOT_LOGGED:
                fields = {name: record[name] for name in LOGGED_FIELDS if name in record}
                logs.event(log, "smg", level=getattr(logging, str(level), logging.INFO), text=message, **fields)


def main() -> int:
    """Run smg until SIGTERM, and return its exit code."""
    args = child.read_arguments(SmgArgs)
    logs.setup(args.config, "openai")
    child.listen()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory has prompts; a front end reads its descriptors
    # The model's tokenizer comes from its folder or from a front end, never from a hub.
    os.environ.update(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:1")
    from smg import cli

    heartbeat = child.Heartbeat()
    sys.stdout = open(os.dup(1), "w")  # noqa: SIM115  events; smg writes on descriptor 1
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    threading.Thread(target=_log_lines, args=(reading,), name="log", daemon=True).start()
    threading.Thread(target=_watch, args=(args, heartbeat), name="watch", daemon=True).start()
    level = args.config.log_level if args.config.log_level in ("debug", "error") else "warn"
    sys.argv = ["smg", "launch", *args.arguments, "--log-json", "--log-level", level]
    return cli.main() or 0


if __name__ == "__main__":
    sys.exit(main())
