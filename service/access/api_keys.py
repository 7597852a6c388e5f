"""API keys: their file, and `npuserve keys` that writes it.

The file is TOML, a table for each name:

    [alice]
    sha256 = "..."          # of the key, in hex; a list of them while a key is replaced by another
    admin = true            # may call AdminService; absent: no
    max_requests = 8        # at once; absent: the server's max_requests_per_client; 0: as many as they like
    min_priority = -10      # of a request, -100 to 100, lower is earlier; absent: the server's min_priority
    max_priority = 10       # of a request; absent: the server's max_priority

A key is 256 random bits, so its plain SHA-256 says nothing of it: there is no dictionary to try, and 2**256 guesses are
too many for a fast hash as for a slow one. A slow, salted hash is for passwords, and would cost every call. Keys that
people think of are for that reason none: make them with `npuserve keys add`.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from npuserve.service.access.auth import Caller, Limits
from npuserve.service.config import PRIORITIES, ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "npuserve-"
"""Of a key, so that scanners for leaked secrets find it."""
MAX_NAMES = 1000
MAX_REQUESTS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = {"max_requests": (0, MAX_REQUESTS), "min_priority": PRIORITIES, "max_priority": PRIORITIES}
_FIELDS = {"sha256", "admin", *_LIMITS}


class Keys:
    """callers: by the SHA-256 of their keys, in hex."""

    def __init__(self, callers: dict[str, Caller]):
        self._callers = [(bytes.fromhex(digest), caller) for digest, caller in callers.items()]

    def find(self, key: str) -> Caller | None:
        """Whose key it is. Every digest is compared, each in the same time, whatever the key."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read(path: str) -> Keys:
    """Raises OSError, and ConfigError that names what is wrong. A file without keys lets nobody in."""
    callers: dict[str, Caller] = {}
    for name, entry in _load(path).items():
        for digest in _hashes(entry):
            if digest in callers:
                raise ConfigError(f"{path}: {name} and {callers[digest].name} have the same key")
            limits = Limits(**{field: entry.get(field) for field in _LIMITS})
            callers[digest] = Caller(name, limits, entry.get("admin", False))
    return Keys(callers)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _hashes(entry: dict[str, Any]) -> list[str]:
    found = entry["sha256"]
    return found if isinstance(found, list) else [found]


def _load(path: str) -> dict[str, dict[str, Any]]:
    """The file's tables, checked."""
    try:
        with open(path, "rb") as file:
            tables: dict[str, Any] = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    if len(tables) > MAX_NAMES:
        raise ConfigError(f"{path}: at most {MAX_NAMES} names, got {len(tables)}")
    for name, entry in tables.items():
        _check(f"{path}: {name}", name, entry)
    return tables


def _check(where: str, name: str, entry: object) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name is 1 to 64 letters, digits, '.', '_' and '-', the first no sign")
    if not isinstance(entry, dict) or "sha256" not in entry:
        raise ConfigError(f"{where}: a table with sha256 is needed, as npuserve keys add writes it")
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ConfigError(f"{where}.{unknown[0]}: no such field; there are {', '.join(sorted(_FIELDS))}")
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in _hashes(entry)):
        raise ConfigError(f"{where}.sha256: must be 64 lower-case hex digits, or a list of such")
    if not isinstance(entry.get("admin", False), bool):
        raise ConfigError(f"{where}.admin: must be true or false")
    for field, (low, high) in _LIMITS.items():
        value = entry.get(field, high)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{where}.{field}: must be a whole number in [{low}, {high}]")
    if entry.get("min_priority", PRIORITIES[0]) > entry.get("max_priority", PRIORITIES[1]):
        raise ConfigError(f"{where}.min_priority: must not be above max_priority")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), help="add prints the new key, once")
    parser.add_argument("file", metavar="FILE", help="the file of --api-keys; add makes it where there is none")
    parser.add_argument("name", metavar="NAME", nargs="?", help="whose key; add gives a name that is there one more")
    parser.add_argument("--admin", action="store_true", help="add: may call AdminService, too")
    parser.add_argument("--max-requests", type=int, metavar="N", help="add: at once; 0: as many as they like")
    parser.add_argument("--min-priority", type=int, metavar="N", help="add: lowest priority; lower is earlier")
    parser.add_argument("--max-priority", type=int, metavar="N", help="add: highest priority")


def run(args: argparse.Namespace) -> int:
    """0, or ConfigError in one sentence. A server that reads the file takes the change within seconds."""
    try:
        there = args.action != "add" or os.path.exists(args.file)
        tables = _load(args.file) if there else {}
        if args.action == "list":
            for name, entry in tables.items():
                rights = [f"{field}={entry[field]}" for field in ("admin", *_LIMITS) if field in entry]
                print(" ".join([name, f"keys={len(_hashes(entry))}", *rights]))
            return 0
        if args.name is None:
            raise ConfigError(f"keys {args.action}: NAME is missing")
        if args.action == "remove":
            if args.name not in tables:
                raise ConfigError(f"{args.file}: there is no {args.name}")
            del tables[args.name]
            _save(args.file, tables)
            return 0
        key = PREFIX + secrets.token_urlsafe(32)
        entry = tables.setdefault(args.name, {"sha256": []})
        entry["sha256"] = [*_hashes(entry), _digest(key).hex()]
        if args.admin:
            entry["admin"] = True
        entry.update({field: value for field in _LIMITS if (value := getattr(args, field)) is not None})
        _check(args.name, args.name, entry)
        _save(args.file, tables)
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}") from None
    print(key)
    return 0


def _save(path: str, tables: dict[str, dict[str, Any]]) -> None:
    """In one go, readable by its owner alone. Comments are not kept."""
    lines = ["# API keys of npuserve by their SHA-256; written by `npuserve keys`."]
    for name, entry in tables.items():
        # A name may have dots; a basic string in quotes says it as it is.
        lines += ["", f'["{name}"]', "sha256 = [" + ", ".join(f'"{digest}"' for digest in _hashes(entry)) + "]"]
        lines += [f"{field} = {str(entry[field]).lower()}" for field in ("admin", *_LIMITS) if field in entry]
    target = Path(path).resolve()
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:  # mode 0600
        try:
            file.write("\n".join(lines) + "\n")
            file.close()
            os.replace(file.name, target)
        except OSError:
            os.unlink(file.name)
            raise
