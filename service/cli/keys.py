"""Command `npuserve keys`: add, list and remove the API keys in a file."""

from __future__ import annotations

import argparse
import os
import secrets

from npuserve.service.access.api_keys import LIMITS, PREFIX, check_table, hash_key, hashes, load_tables, save_tables
from npuserve.service.config import ConfigError


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
        tables = load_tables(args.file) if exists else {}
        if args.action == "list":
            for name, entry in tables.items():
                rights = [f"{field}={entry[field]}" for field in ("admin", *LIMITS) if field in entry]
                print(" ".join([name, f"keys={len(hashes(entry))}", *rights]))
            return 0
        if args.name is None:
            raise ConfigError(f"keys {args.action}: NAME is missing")
        if args.action == "remove":
            if args.name not in tables:
                raise ConfigError(f"{args.file}: there is no {args.name}")
            del tables[args.name]
            save_tables(args.file, tables)
            return 0
        key = PREFIX + secrets.token_urlsafe(32)
        entry = tables.setdefault(args.name, {"sha256": []})
        entry["sha256"] = [*hashes(entry), hash_key(key).hex()]
        if args.admin:
            entry["admin"] = True
        entry.update({field: value for field in LIMITS if (value := getattr(args, field)) is not None})
        check_table(args.name, args.name, entry)
        save_tables(args.file, tables)
    except OSError as error:
        raise ConfigError(f"{args.file}: {error.strerror}") from None
    print(key)
    return 0
