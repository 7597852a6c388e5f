"""Runs the command `npuserve` as a process of its own."""

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
    """Run a command and wait for its end. Output is decoded; bytes that are not UTF-8 are kept as surrogates.

    environ: variables to add.
    """
    done = subprocess.run(
        [sys.executable, "-m", "npuserve.cli", *arguments], input=stdin, stdout=stdout,
        stderr=subprocess.PIPE, check=False, env={**os.environ, **(environ or {})})
    out, err = ((text or b"").decode(errors="surrogateescape") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)
