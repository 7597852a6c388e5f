"""The command `npuserve` as a user runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def npuserve(
    *arguments: str | bytes, stdin: bytes = b"", stdout: int | IO[bytes] = subprocess.PIPE,
    environ: Mapping[str, str | bytes] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. environ: variables to add. Its output is decoded; bytes that cannot be are kept."""
    done = subprocess.run(
        [sys.executable, "-m", "npuserve.service.cli", *arguments], input=stdin, stdout=stdout,
        stderr=subprocess.PIPE, check=False, env={**os.environ, **(environ or {})})
    out, err = ((text or b"").decode(errors="surrogateescape") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)
