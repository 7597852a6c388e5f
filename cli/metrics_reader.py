"""Reader of metrics pages, and of what changed between two of them."""

from __future__ import annotations

import http.client
import math
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from npuserve.service import probe

Labels = Mapping[str, str]
TIMEOUT = 5.0


class Unreadable(Exception):
    """The address has no readable metrics page of npuserve; the message is a sentence with the address."""


@dataclass(frozen=True)
class Page:
    """Metrics page at one time.

    time: seconds of time.monotonic().
    samples: name on the page -> (labels, value) of each sample.
    """

    time: float
    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with these labels; 0 if there are none."""
        return sum(value for sample_labels, value in self.samples.get(name, ())
                   if labels.items() <= sample_labels.items())


def page_url(target: str) -> str:
    """Return the URL of the metrics page at HOST:PORT or at a URL, which can lack its path.

    Raise ValueError for any other text.
    """
    url = urllib.parse.urlsplit(target if "://" in target else f"http://{target}")
    if url.scheme not in ("http", "https") or not url.hostname or not (url.port or "://" in target):
        raise ValueError(f"{target!r} is neither HOST:PORT nor the URL of a metrics page")
    return url._replace(path=url.path if url.path.strip("/") else "/metrics").geturl()


def read_page(url: str) -> Page:
    """Fetch a page. Raise Unreadable."""
    try:
        with probe.malformed_name_error():
            page = urllib.request.urlopen(url, timeout=TIMEOUT)
        with page as answer:
            return parse_page(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise Unreadable(f"{url}: HTTP {error.code}, no metrics page") from None
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else OSError(error.reason)
        if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
            raise Unreadable(f"{url}: this port speaks no TLS; the metrics page is http://") from None
        host = urllib.parse.urlsplit(url).hostname or ""
        raise Unreadable(f"{url}: {probe.why_no_connection(reason, host)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreadable(f"{url}: {_why_no_page(url, error)}") from None
    except ValueError as error:
        raise Unreadable(f"{url}: not a metrics page: {error}") from None


def _why_no_page(url: str, error: Exception) -> str:
    """Return why a server that accepts connections does not answer in HTTP."""
    parts = urllib.parse.urlsplit(url)
    try:
        protocol = probe.protocol_at(parts.hostname or "", parts.port or 80)
    except OSError as failed:
        return probe.why_no_connection(failed, parts.hostname or "")
    if protocol in ("gRPC", "TLS"):
        spoken = "gRPC" if protocol == "gRPC" else "TLS, which the metrics page never does"
        return f"this port speaks {spoken}; give the metrics port, which is 9090 by default"
    return f"no metrics page: {type(error).__name__}"


def parse_page(text: str) -> Page:
    """Return the page of this text, read now. Raise ValueError for another text."""
    samples: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    if not any(name.startswith("npuserve_") for name in samples):
        raise ValueError("it has no metric of npuserve")
    return Page(time.monotonic(), samples)


@dataclass(frozen=True)
class Window:
    """Time between two pages of the same server. A counter that decreased belongs to a restarted server and counts
    from 0."""

    before: Page
    after: Page

    @property
    def seconds(self) -> float:
        return max(self.after.time - self.before.time, 1e-9)

    def increase(self, name: str, **labels: str) -> float:
        """Return the increase of a counter, over all samples with these labels."""
        now = self.after.sum(name, **labels)
        was = self.before.sum(name, **labels)
        return now - was if now >= was else now

    def rate(self, name: str, **labels: str) -> float:
        """Return the increase per second."""
        return self.increase(name, **labels) / self.seconds

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """Return the increase of `part` divided by that of `whole`; None if `whole` did not increase."""
        count = self.increase(whole, **labels)
        return self.increase(part, **labels) / count if count else None

    def mean(self, histogram: str, **labels: str) -> float | None:
        """Return the mean of the observations; None if there were none."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count", **labels)

    def quantile(self, q: float, histogram: str, **labels: str) -> float | None:
        """Return the quantile that Prometheus' histogram_quantile computes: linear within a bucket.

        Return None if there were no observations, and the highest finite bound for a quantile above it.
        """
        bounds: defaultdict[float, float] = defaultdict(float)
        for page, sign in ((self.after, 1), (self.before, -1)):
            if sign < 0 and page.sum(f"{histogram}_count", **labels) > self.after.sum(f"{histogram}_count", **labels):
                break
            for bucket, value in page.samples.get(f"{histogram}_bucket", ()):
                if labels.items() <= bucket.items():
                    bounds[float(bucket["le"])] += sign * value
        count = bounds.get(math.inf, 0.0)
        if count <= 0:
            return None
        low = below = 0.0
        for bound, at_most in sorted(bounds.items()):
            if at_most >= q * count and at_most > below:
                return low if bound == math.inf else low + (bound - low) * (q * count - below) / (at_most - below)
            low = bound
            below = at_most
        return low
