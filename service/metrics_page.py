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
from typing import TYPE_CHECKING

from npuserve.service.config import ConfigError, ServerConfig, endpoint

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HEARTBEAT = "npuserve_engine_heartbeat_seconds"
AGE = "npuserve_engine_heartbeat_age_seconds"


class MetricsPage:
    """Serves `url` from a thread until `close`.

    folder: where the processes' files are, for this whole process's life: prometheus_client reads the variable when
    it is first imported. Raises ConfigError if the port cannot be had.
    """

    def __init__(self, folder: Path, config: ServerConfig):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.multiprocess import MultiProcessCollector

        # Makes this process's own files, in which every metric without labels is 0.
        from npuserve.service import metrics

        for counter, known in metrics.KNOWN.items():
            for labels in known:
                counter.labels(*labels)
        metrics.target_seconds.labels("ttft").set(config.target_ttft_seconds)
        metrics.target_seconds.labels("itl").set(config.target_itl_seconds)
        self._metrics = metrics
        self._vllm = config.metrics_vllm_aliases
        self._model = ""
        self._folder = folder
        self._all = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
        self._last_beat = time.monotonic()
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        host, port = config.host, config.metrics_port
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
        if self._vllm and self._model:
            from npuserve.service.vllm_metrics import aliases

            yield from aliases(found, self._model)
        for declared in REGISTRY.collect():
            if declared.name.startswith("npuserve_") and declared.name != HEARTBEAT:
                yield found.get(declared.name) or Metric(declared.name, declared.documentation, declared.type)
        age = max(0.0, time.monotonic() - self._last_beat)
        yield GaugeMetricFamily(AGE, "Since the engine's last sign of life", value=age)

    def engine_restarted(self) -> None:
        self._metrics.engine_restarts_total.inc()

    def built(self, backend: str, model: str) -> None:
        """The model is loaded. backend: the one that the engine runs on. model: the name that it is served under."""
        self._model = model
        self._metrics.build_info.labels(version("npuserve"), version("torch"), backend, model).set(1)

    def forget(self, pid: int) -> None:
        """The process is dead: its gauges go; what it counted stays."""
        from prometheus_client.multiprocess import mark_process_dead

        self._sums()
        mark_process_dead(pid, str(self._folder))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _sums(self) -> dict[str, Metric]:
        """All processes' metrics by name; notes the latest heartbeat on the way."""
        found = {metric.name: metric for metric in self._all.collect()}
        for sample in found[HEARTBEAT].samples if HEARTBEAT in found else ():
            self._last_beat = max(self._last_beat, sample.value)
        return found
