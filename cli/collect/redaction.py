"""Removal of secrets from settings and variables, and of prompts from log lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

SECRET_SETTINGS = frozenset(
    {"tls_cert", "tls_key", "tls_client_ca", "api_keys", "admin_certificates"})
"""Settings that are paths of secrets, or names of persons."""
REMOVED = "removed"

_VARIABLE = re.compile(
    r"(ASCEND|HCCL|ACL|ASDOPS|ATB|TASK_QUEUE|PYTORCH_NPU|TORCH_|CUDA_|TRITON_|OMP_|GOMP_|NPUSERVE_|EMULATED_)\w*|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|INF_NAN_MODE_ENABLE|CPU_AFFINITY_CONF")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY|KEYS\b|CERT|TLS|_CA\b", re.IGNORECASE)
_USER = re.compile(r"(://)\S*@")
_QUERY = re.compile(r"(://[^?\s]*\?)\S+")
_RECORD = re.compile(r'\d{4}-\d\d-\d\d (?:[\d:.]+ )?[A-Z]+ [\w.-]+: |{"time": ')
"""Beginning of a log record in text or JSON. Other lines continue the record before them, or are raw output."""
_TEXT_FIELD = re.compile(r' (?:prompt|text)=(?:"(?:[^"\\]|\\.)*(?:"|$)|\S*)')
_OUTPUT = re.compile(r"(?:engine|rank)(?:-\d+)? said\b")
"""Message of a line with the output of a child process that gets no prompts."""
_CALLBACK = re.compile(r"(Exception in callback [\w.<>]+).*", re.DOTALL)
"""Message of asyncio, which shows arguments."""
_WARNING = re.compile(r"(\S+:\d+: \w*Warning).*", re.DOTALL)
"""Message of Python's warnings."""
_TRACEBACK = re.compile(r"Traceback \(|During handling of|The above exception was")
_GROUP = re.compile(r"[ |+]*[|+] ")
"""Beginning of the lines of a traceback of an exception group."""
_RAW = re.compile(
    r"\[(?:ERROR|WARN(?:ING)?|INFO|EVENT|DEBUG|TRACE|PID: \d+|rank ?\d+|[CEFIW]\d{4} )|E[A-Z0-9]\d{4}: |ERR\d{5}\b|"
    r"[CEFIW]\d{4} [\d:.]+ |Fatal Python error: |(?:Current thread|Thread) 0x|  File \"|Extension modules: |"
    r"terminate called after|Segmentation fault|Aborted|Killed|Bus error|double free|free\(\)|malloc\(\)|"
    r"log record of \S+ cannot be formatted$|TBE Subprocess")
"""Beginning of raw output that is kept: of CANN, torch_npu, gRPC, faulthandler, the C library and the log itself."""


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with "removed" in place of secrets."""
    return {name: REMOVED if name in SECRET_SETTINGS and value else _address(value)
            if isinstance(value, str) else value for name, value in given.items()}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change a device's software or the server, without secrets."""
    return {name: REMOVED if _SECRET.search(name) else _address(value)
            for name, value in sorted(environ.items()) if _VARIABLE.fullmatch(name)}


def log_lines(text: str, *, is_cut: bool = False) -> list[str]:
    """Return the lines of the server's log, in either format, without the prompts that --log-prompts and bugs add.

    Of an exception they keep the frames and the class, since its message may quote a prompt. Of raw output they keep
    the lines that begin as those of known libraries, up to the first other line: an error of a library may quote text.

    text: as the server wrote it, without what a container runtime or journald adds to lines.
    is_cut: the text is the end of a log, whose first record may have lost its beginning and is left out.
    """
    lines = text.removesuffix("\n").split("\n")  # prompts may have other separators
    kept: list[str] = []
    begin = 0
    if is_cut:
        begin = next((i for i, line in enumerate(lines) if i and _RECORD.match(line)), len(lines))
    while begin < len(lines):
        end = begin + 1
        while end < len(lines) and not _RECORD.match(lines[end]):
            end += 1
        first = [_log_line(lines[begin])] if _RECORD.match(lines[begin]) else []
        kept += first + _raw_lines(lines[begin + len(first) : end])
        begin = end
    return kept


def _address(value: str) -> str:
    """Return a setting without the user, the password and the query of an address."""
    return _QUERY.sub(r"\1removed", _USER.sub(r"\1removed@", value))


def _raw_lines(lines: list[str]) -> list[str]:
    """Return the lines after a record without messages of exceptions and without unknown output.

    A message begins on the first line of a traceback that is not indented, or with the first unknown line. It ends with
    the record or at the next traceback.
    """
    kept: list[str] = []
    is_traceback = is_message = False
    removed = 0
    for line in lines:
        if group := _GROUP.match(line):
            line = line[group.end() :]
        if _TRACEBACK.match(line) or line.startswith("Exception Group Traceback ("):
            is_traceback = True
            is_message = False
            kept.append(line)
        elif is_message:
            removed += bool(line) and not is_traceback
        elif is_traceback and line and not line.startswith(" "):
            is_message = True
            name = re.match(r"[\w.]+", line)
            kept.append(name[0] if name else REMOVED)
        elif is_traceback or not line or _RAW.match(line):
            kept.append(line)
        else:
            is_message = True
            removed += 1
    return [*kept, f"({removed} lines of unknown output are removed)"] if removed else kept


def _log_line(line: str) -> str:
    """Return the first line of a record."""
    if not line.startswith("{"):
        head, colon, message = line.partition(": ")
        return head + colon + (message if _OUTPUT.match(message) else _TEXT_FIELD.sub("", _constant(message)))
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return "(a line is removed)"
    message = str(fields.get("message", ""))
    if not str(fields.get("logger", "npuserve")).startswith(("npuserve", "__main__")):
        fields["message"] = _constant(message.partition("\n")[0])
    fields.pop("prompt", None)
    if not _OUTPUT.match(message):
        fields.pop("text", None)
    if "exception" in fields:
        fields["exception"] = "\n".join(_raw_lines(str(fields["exception"]).split("\n")))
    return json.dumps(fields, ensure_ascii=False)


def _constant(message: str) -> str:
    """Return the message of a library's logger without its variable part."""
    return _WARNING.sub(r"\1", _CALLBACK.sub(r"\1", message))
