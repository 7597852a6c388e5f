"""Removal of secrets from settings and variables, and of prompts from log lines."""

from __future__ import annotations

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
_USER = re.compile(r"(://)[^/@\s]+@")
_TEXT_FIELD = re.compile(r' (?:prompt|text)=(?:"(?:[^"\\]|\\.)*"|\S*)')
_OUTPUT = re.compile(r"\w+(-\d+)? said$")
"""Message of a line with the output of a child process's library, which gets no prompts."""


def settings(config: ServerConfig) -> dict[str, Any]:
    """Return the settings, with "removed" in place of secrets."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    return {name: REMOVED if name in SECRET_SETTINGS and value else _USER.sub(r"\1removed@", value)
            if isinstance(value, str) else value for name, value in found.items()}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change a device's software or the server, without secrets."""
    return {name: REMOVED if _SECRET.search(name) else _USER.sub(r"\1removed@", value)
            for name, value in sorted(environ.items()) if _VARIABLE.fullmatch(name)}


def log_lines(lines: list[str]) -> list[str]:
    """Return log lines of the server, in either format, without the prompts that --log-prompts and bugs add."""
    return [_log_line(line) for line in lines]


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
    if "exception" in fields:  # the frames, without the message
        fields["exception"] = "\n".join(
            frame for frame in str(fields["exception"]).splitlines() if frame.startswith((" ", "Traceback")))
    return json.dumps(fields, ensure_ascii=False)
