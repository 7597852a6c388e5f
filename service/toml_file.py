"""Reader of TOML files, which reports every fault as ConfigError."""

from __future__ import annotations

import sys
from typing import Any

from npuserve.service.config import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError, or ConfigError with the reason if it is not valid."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    except ValueError:  # Python's limit of int()
        reason = "a number has too many digits"
    except RecursionError:
        reason = "its arrays or tables are nested too deeply"
    raise ConfigError(f"{path}: not a TOML file: {reason}")
