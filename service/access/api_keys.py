"""File of API keys. The command `npuserve keys` (cli/keys.py) writes it.

The file is TOML, with a table for each name:

    [alice]
    sha256 = "..."          # hash of the key, in hex; a list of hashes while a key is rotated
    admin = true            # may call AdminService; default: false
    max_requests = 8        # concurrent requests; 0: no limit; default: the server's max_requests_per_client
    min_priority = -10      # lowest priority of a request, -100 to 100, lower is earlier; default: the server's
    max_priority = 10       # highest priority of a request; default: the server's

A key has 256 random bits, so its plain SHA-256 reveals nothing: there is no dictionary to try, and 2**256 guesses are
too many with a fast hash, too. A slow, salted hash is for passwords, and would slow down every call. Create keys with
`npuserve keys add`: a key that a person invents has too few random bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

from npuserve.service.access.caller import Caller, Limits
from npuserve.service.config import PRIORITY_RANGE, ConfigError
from npuserve.service.toml_file import read_toml

PREFIX = "npuserve-"
"""Prefix of every key, by which scanners for leaked secrets find it."""
MAX_NAMES = 1000
MAX_REQUESTS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
LIMITS = {"max_requests": (0, MAX_REQUESTS), "min_priority": PRIORITY_RANGE, "max_priority": PRIORITY_RANGE}
_FIELDS = {"sha256", "admin", *LIMITS}


class Keys:
    """API keys of a server. callers: caller by the SHA-256 of its key, in hex."""

    def __init__(self, callers: dict[str, Caller]):
        self._callers = [(bytes.fromhex(digest), caller) for digest, caller in callers.items()]

    def find(self, key: str) -> Caller | None:
        """Return the caller of the key, or None. Compares the key with every digest, each in constant time."""
        digest = hash_key(key)
        match = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                match = caller
        return match


def read(path: str) -> Keys:
    """Read a file of API keys. With an empty file, no key is valid.

    Raises OSError if the file cannot be read, ConfigError with the reason if it is invalid.
    """
    callers: dict[str, Caller] = {}
    for name, entry in load_tables(path).items():
        for digest in hashes(entry):
            if digest in callers:
                raise ConfigError(f"{path}: {name} and {callers[digest].name} have the same key")
            limits = Limits(**{field: entry.get(field) for field in LIMITS})
            callers[digest] = Caller(name, limits, entry.get("admin", False))
    return Keys(callers)


def new_key() -> str:
    """Return a random key."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode(errors="replace")).digest()


def hashes(entry: dict[str, Any]) -> list[str]:
    """Return the hashes in a table, in hex."""
    digests = entry["sha256"]
    return digests if isinstance(digests, list) else [digests]


def load_tables(path: str) -> dict[str, dict[str, Any]]:
    """Return the file's tables, by name. Raises OSError, or ConfigError with the reason if it is invalid."""
    tables = read_toml(path)
    check_count(path, tables)
    for name, entry in tables.items():
        check_table(f"{path}: {name}", name, entry)
    return tables


def check_count(path: str, tables: dict[str, dict[str, Any]]) -> None:
    """Raise ConfigError if the tables of a file are too many."""
    if len(tables) > MAX_NAMES:
        raise ConfigError(f"{path}: at most {MAX_NAMES} names, got {len(tables)}")


def check_table(where: str, name: str, entry: object) -> None:
    """Raise ConfigError if a name or its table is invalid. where: file and name, for the message."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name is 1 to 64 letters, digits, '.', '_' and '-', and begins with a letter or digit")
    if not isinstance(entry, dict) or "sha256" not in entry:
        raise ConfigError(f"{where}: a table with sha256 is needed, as written by npuserve keys add")
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ConfigError(f"{where}.{unknown[0]}: no such field; the fields are {', '.join(sorted(_FIELDS))}")
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in hashes(entry)):
        raise ConfigError(f"{where}.sha256: must be 64 lower-case hex digits, or a list of such strings")
    if not isinstance(entry.get("admin", False), bool):
        raise ConfigError(f"{where}.admin: must be true or false")
    for field, (low, high) in LIMITS.items():
        value = entry.get(field, high)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{where}.{field}: must be a whole number in [{low}, {high}]")
    if entry.get("min_priority", PRIORITY_RANGE[0]) > entry.get("max_priority", PRIORITY_RANGE[1]):
        raise ConfigError(f"{where}.min_priority: must not be above max_priority")


def save_tables(path: str, tables: dict[str, dict[str, Any]]) -> None:
    """Replace the file atomically, with its owner, group and mode. Only its owner may read a new file.

    Comments are lost.
    """
    lines = ["# API keys of npuserve by their SHA-256; written by `npuserve keys`."]
    for name, entry in tables.items():
        # Quote the name, which may contain dots.
        lines += ["", f'["{name}"]', "sha256 = [" + ", ".join(f'"{digest}"' for digest in hashes(entry)) + "]"]
        lines += [f"{field} = {str(entry[field]).lower()}" for field in ("admin", *LIMITS) if field in entry]
    target = Path(path).resolve()
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:  # mode 0600
        try:
            file.write("\n".join(lines) + "\n")
            _copy_access(target, file.fileno())
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power failure may leave an empty file otherwise
            os.replace(file.name, target)
        except OSError:
            os.unlink(file.name)
            raise


def _copy_access(source: Path, descriptor: int) -> None:
    """Give an open file of mode 0600 the owner, group and mode of `source`, if it exists.

    A process that may not give the file away keeps it, with the group. Without the group the mode remains 0600.
    """
    if not source.exists():
        return
    known = source.stat()
    for owner in (known.st_uid, -1):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, known.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(known.st_mode))
            return
