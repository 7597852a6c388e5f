"""Reader of TOML files, which reports every fault as ConfigError."""

from __future__ import annotations

import re
import sys
from typing import Any

from npuserve.service.config import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_KEY_PARTS = 100
"""Maximum number of the parts of a key, as in a.b.c. The parser needs memory for the square of it."""
_PART = r"""(?:[^\s.=,\[\]{}"'#]+|"[^"\n]*"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(rf"(?:^|[{{,])[ \t]*\[{{0,2}}[ \t]*(?:{_PART}\.[ \t]*){{{MAX_KEY_PARTS}}}", re.MULTILINE)
"""Beginning of a key with more parts, which stands at the beginning of a line or in an inline table."""


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError, or ConfigError with the reason if it is not valid."""
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
        if _LONG_KEY.search(text):
            raise ConfigError(f"{path}: not a TOML file: a key has more than {MAX_KEY_PARTS} parts")
        content = tomllib.loads(text)
        if not _has_large_integer(content):
            return content
        reason = "an integer needs more than 64 bits"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    except ValueError:  # Python's limit of int()
        reason = "a number has too many digits"
    except RecursionError:
        reason = "its arrays or tables are nested too deeply"
    raise ConfigError(f"{path}: not a TOML file: {reason}")


def _has_large_integer(value: Any) -> bool:
    """Return whether a value holds an integer outside the range of TOML, which Python may be unable to print."""
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 63
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_large_integer, inner))
