"""Command `npuserve keys`: add, list and remove the API keys in a file."""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npuserve.service.access.api_keys import (
    LIMITS,
    check_count,
    check_table,
    hash_key,
    hashes,
    load_tables,
    new_key,
    save_tables,
)
from npuserve.service.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), metavar="{add,list,remove}",
                        help="add: create a key and print it, once")
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
    lines: list[str] = []
    try:
        if args.action == "list":
            lines = list(_describe(args.file))
        elif args.name is None:
            raise ConfigError(f"keys {args.action}: NAME is missing: npuserve keys {args.action} FILE NAME")
        else:
            with _locked(args.file):
                if args.action == "remove":
                    _remove(args.file, args.name)
                else:
                    lines = [_add(args)]
    except OSError as error:
        makes = "; npuserve keys add FILE NAME makes it" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{args.file}: {error.strerror}{makes}") from None
    for line in lines:
        print(line)
    return 0


def _describe(file: str) -> Iterator[str]:
    for name, entry in load_tables(file).items():
        rights = [f"{field}={entry[field]}" for field in ("admin", *LIMITS) if field in entry]
        yield " ".join([name, f"keys={len(hashes(entry))}", *rights])


def _remove(file: str, name: str) -> None:
    tables = load_tables(file)
    if name not in tables:
        raise ConfigError(f"{file}: there is no {name}")
    del tables[name]
    save_tables(file, tables)


def _add(args: argparse.Namespace) -> str:
    """Add a key, and return it."""
    tables = load_tables(args.file) if os.path.exists(args.file) else {}
    key = new_key()
    entry = tables.setdefault(args.name, {"sha256": []})
    entry["sha256"] = [*hashes(entry), hash_key(key).hex()]
    if args.admin:
        entry["admin"] = True
    entry.update({field: value for field in LIMITS if (value := getattr(args, field)) is not None})
    check_count(args.file, tables)
    check_table(args.name, args.name, entry)
    save_tables(args.file, tables)
    return key


@contextmanager
def _locked(file: str) -> Iterator[None]:
    """Lock the file's folder against other processes of this command. The file itself is replaced by each change."""
    folder = os.open(Path(file).resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
