"""Command `npuserve collect`: write one archive of what a bug report needs.

It holds versions, npu-smi's reports, CANN's log, the settings without secrets, and optionally the last lines of the
server's log without prompts and the report of the acceptance check. The settings are those of each server that this
user runs on this machine, else those of this command line. The manifest lists missing programs and files. It needs
neither torch nor a device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from npuserve.cli.collect import redaction, sources
from npuserve.cli.collect.archive import Archive, Part, Status
from npuserve.npu.cann.readings import Readings
from npuserve.service import clock, settings
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.supervisor.running_servers import RunningServer, running_servers

MAX_BYTES = 64 << 20
MAX_REPORT_BYTES = 8 << 20
COMMAND_SECONDS = 10.0
MAX_LOG_LINES = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("collect")
    group.add_argument("--output", metavar="FILE", help="archive (default: npuserve-collect-DATE.tar.gz here)")
    group.add_argument("--log", metavar="FILE", help=f"log of the server, as it wrote it or as kubectl logs prints "
                       f"it: its last {MAX_LOG_LINES} lines, without prompts")
    group.add_argument("--plog", metavar="FOLDER", help="CANN's log (default: ASCEND_PROCESS_LOG_PATH, ~/ascend/log)")
    group.add_argument("--accept", action="store_true", help="run npuserve check --accept, and add its report")
    group.add_argument("--accept-report", metavar="FILE", help="an earlier report of npuserve check --accept --json")
    group.add_argument("--seconds", type=number(float, 1, 3600), default=120.0,
                       help="time for everything but --accept (default: 120)")
    group.add_argument("--accept-seconds", type=number(float, 10, 86400), default=1800.0,
                       help="time for --accept (default: 1800)")
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the archive; print its path and what is missing. Raises ConfigError for an unusable output or setting."""
    config = settings.load(args, os.environ)
    path = Path(args.output or f"npuserve-collect-{clock.now():%Y%m%d-%H%M%S}.tar.gz")
    deadline = time.monotonic() + args.seconds
    try:
        archive = Archive(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"output: {path}: {error.strerror}") from None
    servers = list(running_servers())
    with archive:
        for name, part in parts(args, config, servers, deadline):
            archive.add(name, part)
        if args.accept:
            archive.add("accept.json", accept(config, args.accept_seconds))
    for line in archive.lines:
        if line.status not in ("complete", "absent") or line.name.startswith("settings"):
            print(f"{line.status:10} {line.name}: {line.detail}")
    if not servers:
        print(f"no server of this user was found in {tempfile.gettempdir()}: run npuserve collect where it runs, with "
              "its TMPDIR, or with its flags")
    print(f"{path}: {path.stat().st_size} bytes, {sum(line.bytes > 0 for line in archive.lines)} files. It holds no "
          "prompts and no keys; read it before you send it")
    return 0


def parts(
    args: argparse.Namespace, config: ServerConfig, servers: Sequence[RunningServer], deadline: float
) -> Iterator[tuple[str, Part]]:
    """Yield name and content of each part. After the deadline the remaining ones are skipped."""
    host = Readings(environ=os.environ, run=lambda command: _output(_timed(command, deadline)))
    yield from _settings(config, servers)
    yield "variables.json", _json(redaction.variables(os.environ))
    yield "software.json", sources.software({"driver": host.driver, "firmware": host.firmware, "cann": host.cann})
    given = args.plog or os.environ.get("ASCEND_PROCESS_LOG_PATH")
    log = Path(given or os.path.expanduser("~/ascend/log"))
    devices = {config.device, *(server.settings.get("device") for server in servers)}
    has_npu = bool(given) or log.is_dir() or "npu" in devices or sources.has_npu()
    yield from sources.host_files(Path("/"), has_npu)
    mapping = b""
    commands = {**(sources.NPU_COMMANDS if has_npu else {}), **sources.COMMANDS}
    if "cuda" in devices or sources.has_gpu():
        commands |= sources.GPU_COMMANDS
    for name, command in commands.items():
        part = _timed(command, deadline)
        mapping = part.data if name == "npu-smi/mapping" else mapping
        yield name, part
    for npu in sources.npus(mapping.decode(errors="replace")):
        for report in sources.PER_NPU:
            yield f"npu-smi/{npu}/{report}", _timed(("npu-smi", "info", "-t", report, "-i", npu), deadline)
    if args.log:
        yield "server.log", server_log(Path(args.log))
    if args.accept_report:
        yield "accept.json", accept_report(Path(args.accept_report))
    if has_npu:
        yield from sources.device_logs(log)
    else:
        yield "ascend", Part(b"", "absent", "no NPU and no software of Ascend")


def _settings(config: ServerConfig, servers: Sequence[RunningServer]) -> Iterator[tuple[str, Part]]:
    """Yield the settings of the running servers, and of this command line if it has any or no server runs."""
    for server in servers:
        name = "settings.json" if len(servers) == 1 else f"settings-{server.pid}.json"
        yield name, Part(_dumped(redaction.settings(server.settings)), detail=f"of {server}, version {server.version}")
    if not servers:
        yield "settings.json", Part(_dumped(redaction.settings(msgspec.to_builtins(config))),
                                    detail="of this command line, not of a server")
    elif config != ServerConfig():
        yield "settings-command-line.json", Part(_dumped(redaction.settings(msgspec.to_builtins(config))),
                                                 detail="of this command line, not of a server")


def server_log(path: Path) -> Part:
    """Return the last lines of the server's log, without prompts."""
    part = sources.file(path, 16 << 20, end=True)
    if not part.data:
        return part
    kept = redaction.log_lines(part.data.decode(errors="replace"), is_cut=part.status == "truncated")
    lines = len(kept)
    status: Status = "truncated" if len(kept) > MAX_LOG_LINES else part.status
    kept = kept[-MAX_LOG_LINES:]
    return Part("".join(f"{line}\n" for line in kept).encode(), status, part.detail or f"of {lines} lines")


def accept_report(path: Path) -> Part:
    """Return an earlier report of the acceptance check. Another file is not taken: it may hold prompts."""
    part = sources.file(path, MAX_REPORT_BYTES)
    if part.status == "complete":
        try:
            report = json.loads(part.data)
        except (ValueError, RecursionError):
            report = None
        if not isinstance(report, dict) or "acceptance" not in report:
            return Part(b"", "failed", "is no report of npuserve check --accept --json")
    return part


def accept(config: ServerConfig, seconds: float) -> Part:
    """Run the acceptance check in a process of its own, with the same settings, and return its report."""
    given = msgspec.structs.asdict(config)
    default = msgspec.structs.asdict(ServerConfig())
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings.PREFIX)}
    environment |= {settings.variable(name): str(value) for name, value in given.items() if value != default[name]}
    return sources.run((sys.executable, "-m", "npuserve.cli", "check", "--accept", "--json"), seconds,
                       MAX_REPORT_BYTES, environment)


def _output(part: Part) -> str:
    """Return the output of a command; "" if it was not run, failed or was killed."""
    return part.data.decode(errors="replace") if part.status in ("complete", "truncated") else ""


def _timed(command: Sequence[str], deadline: float) -> Part:
    left = deadline - time.monotonic()
    if left <= 0:
        return Part(b"", "skipped", "the time was over")
    return sources.run(command, min(left, COMMAND_SECONDS))


def _json(value: object) -> Part:
    return Part(_dumped(value))


def _dumped(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()
