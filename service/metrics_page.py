"""/metrics: what all processes of this server count, on one page.

The processes write to memory-mapped files in one folder (see metrics.py); this adds them up at each scrape. It lives
in the supervisor, so it outlasts every other process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from npuserve.service.config import ConfigError, endpoint

HEARTBEAT = "npuserve_engine_heartbeat_timestamp_seconds"
AGE = "npuserve_engine_heartbeat_age_seconds"


class MetricsPage:
    """Serves `url` from a thread until `close`. port: 0 takes a free one.

    folder: where the processes' files are, for this whole process's life: prometheus_client reads the variable when
    it is first imported. Raises ConfigError if the port cannot be had.
    """

    def __init__(self, folder: Path, host: str, port: int):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.multiprocess import MultiProcessCollector

        # Makes this process's own files, in which every metric without labels is 0.
        from npuserve.service import metrics

        self._metrics = metrics
        self._folder = folder
        self._all = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
        self._last_beat = time.time()
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None
        self.url = f"http://{endpoint(host, self._server.server_port)}/metrics"

    def collect(self) -> Iterator[object]:
        """For prometheus_client, at each scrape: the sums, and what nobody has counted yet by name alone."""
        from prometheus_client import REGISTRY
        from prometheus_client.core import GaugeMetricFamily, Metric

        found = self._sums()
        for declared in REGISTRY.collect():
            if declared.name.startswith("npuserve_") and declared.name != HEARTBEAT:
                yield found.get(declared.name) or Metric(declared.name, declared.documentation, declared.type)
        age = max(0.0, time.time() - self._last_beat)
        yield GaugeMetricFamily(AGE, "Since the engine's last sign of life", value=age)

    def engine_restarted(self) -> None:
        self._metrics.engine_restarts_total.inc()

    def built(self, backend: str) -> None:
        """backend: the one that the engine runs on."""
        self._metrics.build_info.labels(version("npuserve"), version("torch"), backend).set(1)

    def forget(self, pid: int) -> None:
        """The process is dead: its gauges go; what it counted stays."""
        from prometheus_client.multiprocess import mark_process_dead

        self._sums()
        mark_process_dead(pid, str(self._folder))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _sums(self) -> dict[str, object]:
        """All processes' metrics by name; notes the latest heartbeat on the way."""
        found = {metric.name: metric for metric in self._all.collect()}
        for sample in found[HEARTBEAT].samples if HEARTBEAT in found else ():
            self._last_beat = max(self._last_beat, sample.value)
        return found
