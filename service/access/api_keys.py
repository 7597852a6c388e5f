"""File of API keys, and the command `npuserve keys` that writes it.

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

from npuserve.service.access.caller import Caller, Limits
from npuserve.service.config import PRIORITY_RANGE, ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "npuserve-"
"""Prefix of every key, by which scanners for leaked secrets find it."""
MAX_NAMES = 1000
MAX_REQUESTS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = {"max_requests": (0, MAX_REQUESTS), "min_priority": PRIORITY_RANGE, "max_priority": PRIORITY_RANGE}
_FIELDS = {"sha256", "admin", *_LIMITS}


class Keys:
    """API keys of a server. callers: caller by the SHA-256 of its key, in hex."""

    def __init__(self, callers: dict[str, Caller]):
        self._callers = [(bytes.fromhex(digest), caller) for digest, caller in callers.items()]

    def find(self, key: str) -> Caller | None:
        """Return the caller of the key, or None. Compares the key with every digest, each in constant time."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def read(path: str) -> Keys:
    """Read a file of API keys. With an empty file, no key is valid.

    Raises OSError if the file cannot be read, ConfigError with the reason if it is invalid.
    """
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
    """Return the file's tables, by name. Raises OSError, or ConfigError with the reason if a table is invalid."""
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
    """Raise ConfigError if a name or its table is invalid. where: file and name, for the message."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name is 1 to 64 letters, digits, '.', '_' and '-', and begins with a letter or digit")
    if not isinstance(entry, dict) or "sha256" not in entry:
        raise ConfigError(f"{where}: a table with sha256 is needed, as written by npuserve keys add")
    if unknown := sorted(entry.keys() - _FIELDS):
        raise ConfigError(f"{where}.{unknown[0]}: no such field; the fields are {', '.join(sorted(_FIELDS))}")
    if not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in _hashes(entry)):
        raise ConfigError(f"{where}.sha256: must be 64 lower-case hex digits, or a list of such strings")
    if not isinstance(entry.get("admin", False), bool):
        raise ConfigError(f"{where}.admin: must be true or false")
    for field, (low, high) in _LIMITS.items():
        value = entry.get(field, high)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{where}.{field}: must be a whole number in [{low}, {high}]")
    if entry.get("min_priority", PRIORITY_RANGE[0]) > entry.get("max_priority", PRIORITY_RANGE[1]):
        raise ConfigError(f"{where}.min_priority: must not be above max_priority")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), help="add: create a key and print it, once")
    parser.add_argument("file", metavar="FILE", help="the file of --api-keys; add creates it if it does not exist")
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the key; add: an existing name gets one more")
    parser.add_argument("--admin", action="store_true", help="add: the key may also call AdminService")
    parser.add_argument("--max-requests", type=int, metavar="N", help="add: maximum concurrent requests; 0: no limit")
    parser.add_argument("--min-priority", type=int, metavar="N", help="add: lowest priority; lower is earlier")
    parser.add_argument("--max-priority", type=int, metavar="N", help="add: highest priority")


def run(args: argparse.Namespace) -> int:
    """Run `npuserve keys`; return the exit code 0. A running server reloads the file within seconds.

    Raises ConfigError with a one-sentence reason.
    """
    try:
        exists = args.action != "add" or os.path.exists(args.file)
        tables = _load(args.file) if exists else {}
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
    """Replace the file atomically; only its owner may read it. Comments are lost."""
    lines = ["# API keys of npuserve by their SHA-256; written by `npuserve keys`."]
    for name, entry in tables.items():
        # Quote the name, which may contain dots.
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
