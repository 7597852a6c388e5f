"""File of API keys."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from npuserve.service.access import api_keys as keys
from npuserve.service.access.caller import Caller, Limits
from npuserve.service.config import ConfigError, ServerConfig

HASH, OTHER = hashlib.sha256(b"one").hexdigest(), hashlib.sha256(b"two").hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_keys_read_handwritten_file(file: Path) -> None:
    file.write_text(f'# ours\n["team.a"]\nsha256 = "{HASH}"\n'
                    f'[b]\nsha256 = ["{OTHER}"]\nadmin = true\nmax_requests = 0\n')
    found = keys.read(str(file))
    assert found.find("one") == Caller("team.a", Limits(None), admin=False)
    assert found.find("two") == Caller("b", Limits(0), admin=True)


def test_keys_empty_file_accepts_no_key(file: Path) -> None:
    file.write_text("")
    assert keys.read(str(file)).find("") is None


@pytest.mark.parametrize(("text", "error_text"), [
    ("x", "not a TOML file"),
    (f'[x]\nsha256 = "{HASH}"\nmax_requests = {"9" * 5000}', "not a TOML file: a number has too many digits"),
    (f'[x]\nsha256 = "{HASH}"\nmax_requests = 0x{"f" * 6000}', "not a TOML file: an integer needs more than 64 bits"),
    ("a=" + "[" * 20_000, "not a TOML file: its arrays or tables are nested too deeply"),
    ("x = 1", "x: a table with sha256 is needed"),
    ("[x]", "x: a table with sha256 is needed"),
    (f'["a b"]\nsha256 = "{HASH}"', "a b: a name is 1 to 64 letters"),
    (f'["ipv4:10.0.0.1"]\nsha256 = "{HASH}"', "a name is 1 to 64 letters"),
    ('[x]\nsha256 = "abc"', "x.sha256: must be 64 lower-case hex digits"),
    (f'[x]\nsha256 = "{HASH.upper()}"', "x.sha256: must be 64 lower-case hex digits"),
    ("[x]\nsha256 = [1]", "x.sha256: must be 64 lower-case hex digits"),
    (f'[x]\nsha256 = "{HASH}"\nadmin = 1', "x.admin: must be true or false"),
    (f'[x]\nsha256 = "{HASH}"\nmax_requests = -1', r"x.max_requests: must be a whole number in \[0, 1048576\]"),
    (f'[x]\nsha256 = "{HASH}"\nmax_requests = true', "x.max_requests: must be a whole number"),
    (f'[x]\nsha256 = "{HASH}"\nmax_requests = 1.5', "x.max_requests: must be a whole number"),
    (f'[x]\nsha256 = "{HASH}"\nlimit = 1',
     "x.limit: no such field; the fields are admin, max_priority, max_requests, min_priority, sha256"),
    (f'[x]\nsha256 = "{HASH}"\nmin_priority = -101', r"x.min_priority: must be a whole number in \[-100, 100\]"),
    (f'[x]\nsha256 = "{HASH}"\nmin_priority = 5\nmax_priority = 4', "x.min_priority: must not be above max_priority"),
    (f'[x]\nsha256 = "{HASH}"\n[y]\nsha256 = "{HASH}"', "y and x have the same key"),
    ("\n".join(f'[k{i}]\nsha256 = "{i:064x}"' for i in range(1001)), "at most 1000 names, got 1001"),
])
def test_keys_invalid_file_names_fault(file: Path, text: str, error_text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=error_text):
        keys.read(str(file))


@pytest.mark.parametrize(("limits", "expected"), [
    (Limits(), (4, (0, 100))),
    (Limits(0, -7, 7), (0, (-7, 7))),
    (Limits(min_priority=5, max_priority=5), (4, (5, 5))),
    (Limits(max_priority=-10), (4, (-10, -10))),
    (Limits(min_priority=50), (4, (50, 100))),
])
def test_limits_of_a_key_replace_those_of_the_server(
    file: Path, limits: Limits, expected: tuple[int, tuple[int, int]]
) -> None:
    values = {name: value for name, value in vars(limits).items() if value is not None}
    keys.save_tables(str(file), {"a": {"sha256": hashlib.sha256(b"key").hexdigest(), **values}})
    caller = keys.read(str(file)).find("key")
    assert caller == Caller("a", limits)
    assert caller.limits.within(ServerConfig(model="m", max_requests_per_client=4)) == expected


def test_limits_of_a_key_above_those_of_the_server() -> None:
    config = ServerConfig(model="m", max_priority=10)
    assert Limits(min_priority=50).within(config)[1] == (50, 50)


def test_keys_find_compares_every_digest(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the first key, the last key, and an unknown key."""
    file.write_text("\n".join(f'[k{i}]\nsha256 = "{hashlib.sha256(b"%d" % i).hexdigest()}"' for i in range(5)))
    found = keys.read(str(file))
    compared = []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    for key, name in (("0", "k0"), ("4", "k4"), ("none", None)):
        compared.clear()
        caller = found.find(key)
        assert (caller and caller.name) == name
        assert len(compared) == 5


def test_save_tables_writes_to_the_disk_before_it_replaces_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be written to the disk replaces nothing."""
    keys.save_tables(str(file), {"a": {"sha256": HASH}})

    def broken(descriptor: int) -> None:
        assert OTHER in Path(f"/proc/self/fd/{descriptor}").read_text()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        keys.save_tables(str(file), {"a": {"sha256": OTHER}})
    assert keys.load_tables(str(file)) == {"a": {"sha256": [HASH]}}
    assert list(file.parent.iterdir()) == [file]
