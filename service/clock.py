"""Dates, for clients and names. Durations and deadlines are of the monotonic clock."""

from __future__ import annotations

import time
from datetime import datetime, timezone


def now() -> datetime:
    """Return the date in UTC."""
    return datetime.now(timezone.utc)


def unix_time() -> float:
    """Return the date in seconds of Unix time."""
    return time.time()
