"""Removal of secrets from settings and variables, and of prompts from log lines."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from npuserve.service.config import ServerConfig

SECRET_SETTINGS = frozenset(
    {"tls_cert", "tls_key", "tls_client_ca", "api_keys", "admin_certificates", "state_folder"})
"""Settings that are paths of secrets, or names of persons."""
REMOVED = "removed"

_VARIABLE = re.compile(
    r"(ASCEND|HCCL|ACL|ASDOPS|ATB|TASK_QUEUE|PYTORCH_NPU|TORCH_|CUDA_|TRITON_|OMP_|GOMP_|NPUSERVE_|EMULATED_)\w*|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|INF_NAN_MODE_ENABLE|CPU_AFFINITY_CONF")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY|KEYS\b|CERT|TLS|_CA\b|STATE_FOLDER", re.IGNORECASE)
_USER = re.compile(r"(://)\S*@")
_QUERY = re.compile(r"(://[^?\s]*\?)\S+")
_RECORD = re.compile(r"\d{4}-\d\d-\d\d |{")
"""Beginning of a log record in text or JSON; other lines continue the record before them."""
_TRACEBACK = re.compile(r"(  [+| ] *)?Traceback \(|During handling of|The above exception was")
_TEXT_FIELD = re.compile(r' (?:prompt|text)=(?:"(?:[^"\\]|\\.)*"|\S*)')
_PREFIX = re.compile(r"\d{4}-\d\d-\d\dT\S+ (?:std(?:out|err) [FP] )?|\w{3} [ \d]\d [\d:]{8} \S+ \S+?\[\d+\]: ")
"""Beginning of lines that `kubectl logs --timestamps`, a container runtime or journald adds."""
_OUTPUT = re.compile(r"\w+(-\d+)? said$")
"""Message of a line with the output of a child process's library, which gets no prompts."""


def settings(config: ServerConfig) -> dict[str, Any]:
    """Return the settings, with "removed" in place of secrets."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    return {name: REMOVED if name in SECRET_SETTINGS and value else _address(value)
            if isinstance(value, str) else value for name, value in found.items()}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change a device's software or the server, without secrets."""
    return {name: REMOVED if _SECRET.search(name) else _address(value)
            for name, value in sorted(environ.items()) if _VARIABLE.fullmatch(name)}


def log_lines(lines: list[str], *, is_cut: bool = False) -> list[str]:
    """Return log lines of the server, in either format, without the prompts that --log-prompts and bugs add.

    Of an exception they keep the frames and the class, since its message may quote a prompt. is_cut: the lines are the
    end of a log, whose first record may have lost its beginning and is left out.
    """
    lines = [_unwrapped(line) for line in lines]
    kept: list[str] = []
    begin = 0
    if is_cut:
        begin = next((i for i, line in enumerate(lines) if i and _RECORD.match(line)), len(lines))
    while begin < len(lines):
        end = begin + 1
        while end < len(lines) and not _RECORD.match(lines[end]):
            end += 1
        first = [_log_line(lines[begin])] if _RECORD.match(lines[begin]) else []
        kept += first + _exception(lines[begin + len(first) : end])
        begin = end
    return kept


def _unwrapped(line: str) -> str:
    """Return the line as the server wrote it, without what a container runtime or journald adds to it."""
    if line.startswith('{"log":'):  # Docker's json-file
        with contextlib.suppress(ValueError):
            line = str(json.loads(line)["log"]).rstrip("\n")
    return _PREFIX.sub("", line, count=1) if _PREFIX.match(line) else line


def _address(value: str) -> str:
    """Return a setting without the user, the password and the query of an address."""
    return _QUERY.sub(r"\1removed", _USER.sub(r"\1removed@", value))


def _exception(lines: list[str]) -> list[str]:
    """Return the lines after a record without the messages of exceptions.

    A message begins on the first line of a traceback that is not indented, and ends with the record or at the next
    traceback. Lines before any traceback are kept: they are the output of a library.
    """
    kept: list[str] = []
    is_traceback = is_message = False
    for line in lines:
        if _TRACEBACK.match(line):
            is_traceback, is_message = True, False
        elif is_message:
            continue
        elif is_traceback and line and not line.startswith(" "):
            is_message = True
            line = line.partition(":")[0]
        kept.append(line)
    return kept


def _log_line(line: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError:
        return line if re.search(r": \w+(-\d+)? said ", line) else _TEXT_FIELD.sub("", line)
    if not isinstance(fields, dict):
        return line
    fields.pop("prompt", None)
    if not _OUTPUT.search(str(fields.get("message", ""))):
        fields.pop("text", None)
    if "exception" in fields:
        fields["exception"] = "\n".join(_exception(str(fields["exception"]).splitlines()))
    return json.dumps(fields, ensure_ascii=False)
