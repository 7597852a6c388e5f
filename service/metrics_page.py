"""/metrics: what all processes of this server count, on one page.

The processes write to memory-mapped files in one folder (see metrics.py); this adds them up at each scrape. It lives
in the supervisor, so it outlasts every other process. The files of a dead process are added to one file of each type
and removed, so that the number of files is bounded by the processes that run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.service.config import ConfigError, ServerConfig, endpoint

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HEARTBEAT = "npuserve_engine_heartbeat_seconds"
AGE = "npuserve_engine_heartbeat_age_seconds"
DEAD = "dead"
"""In place of the process id in the names of the files that hold the counts of all dead processes."""


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 for one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class MetricsPage:
    """Serves `url` from a thread until `close`.

    folder: where the processes' files are, for this whole process's life: prometheus_client reads the variable when
    it is first imported. processes: returns name -> pid of this server's other living processes. Raises ConfigError if
    the port cannot be had.
    """

    def __init__(self, folder: Path, config: ServerConfig, processes: Callable[[], Mapping[str, int]] = dict):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        from prometheus_client import CollectorRegistry, start_http_server

        # Makes this process's own files, in which every metric without labels is 0.
        from npuserve.service import metrics

        for counter, known in metrics.KNOWN.items():
            for labels in known:
                counter.labels(*labels)
        metrics.target_seconds.labels("ttft").set(config.target_ttft_seconds)
        metrics.target_seconds.labels("itl").set(config.target_itl_seconds)
        metrics.requests_limit.labels("running").set(config.max_num_seqs)
        metrics.requests_limit.labels("waiting").set(config.max_queue)
        self._processes = processes
        self._measured: set[str] = set()  # names of processes that have a sample of their memory
        self._metrics = metrics
        self._vllm = config.metrics_vllm_aliases
        self._model = ""
        self._folder = folder
        self._files_lock = threading.Lock()  # scrapes have threads of their own
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

        self._measure_memory()
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
        """Keep what a dead process counted, drop its gauges, and remove its files."""
        self._sums()  # notes its last heartbeat
        with self._files_lock:
            for file in self._folder.glob(f"*_{pid}.db"):
                kind = file.name.partition("_")[0]
                if kind != "gauge":
                    _add(file, self._folder / f"{kind}_{DEAD}.db")
                file.unlink()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _measure_memory(self) -> None:
        processes = {"supervisor": os.getpid(), **self._processes()}
        self._measured |= processes.keys()
        for name in self._measured:
            used = resident_bytes(processes[name]) if name in processes else 0
            self._metrics.resident_memory_bytes.labels(name).set(used)

    def _sums(self) -> dict[str, Metric]:
        """Return all processes' metrics by name; note the latest heartbeat."""
        from prometheus_client.multiprocess import MultiProcessCollector

        with self._files_lock:
            # An empty file is one that its process has not sized yet.
            files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
            merged = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        found = {metric.name: metric for metric in merged}
        for sample in found[HEARTBEAT].samples if HEARTBEAT in found else ():
            self._last_beat = max(self._last_beat, sample.value)
        return found


def _add(source: Path, total: Path) -> None:
    """Add each value of a metrics file to the value of the same key in another file, which is made if it is missing.

    Files hold the buckets of a histogram one by one, not cumulated, so that sums by key are exact.
    """
    from prometheus_client.mmap_dict import MmapedDict

    if not source.stat().st_size:
        return
    sums = MmapedDict(str(total))  # type: ignore[no-untyped-call]
    try:
        for key, value, *_ in MmapedDict.read_all_values_from_file(str(source)):  # type: ignore[no-untyped-call]
            sums.write_value(key, sums.read_value(key)[0] + value, 0.0)  # type: ignore[no-untyped-call]
    finally:
        sums.close()  # type: ignore[no-untyped-call]
