"""Metrics page: the sums over all processes of this server.

Processes write to memory-mapped files in one folder (metrics.py). The page adds them up at each scrape (page_text.py),
in the text format 0.0.4 and uncompressed, which every scraper reads and which takes the least time. It runs in the
supervisor, which outlives the other processes. It keeps a dead process's counts in memory and removes its files, so
that their number does not grow with restarts. An unreadable file is skipped, counted and logged; only its own counts
are lost.

The supervisor reserves the space of its own files at its start, and they do not grow later. A process that finds no
disk space for further metrics keeps them in memory (metrics_file.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from npuserve.service import logs, probe
from npuserve.service.config import ConfigError, ServerConfig, endpoint
from npuserve.service.processes import process_control
from npuserve.service.supervisor.metrics_server import MetricsServer

log = logging.getLogger(__name__)

HEARTBEAT = "npuserve_engine_heartbeat_seconds"
AGE = "npuserve_engine_heartbeat_age_seconds"


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it does not exist."""
    try:
        return process_control.memory_bytes(pid)[1]
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class MetricsPage:
    """Metrics page, served at `url` by a thread until `close`.

    folder: folder of the metrics files. It must not change while this process runs, because prometheus_client reads its
        environment variable at import.
    processes: returns name -> pid of the server's other live processes.
    more: returns a page of other programs' metrics, which is appended; None: there is none.

    Raises ConfigError if the port is not available, or the disk has no space.
    """

    def __init__(self, folder: Path, config: ServerConfig, processes: Callable[[], Mapping[str, int]] = dict,
                 more: Callable[[], str] | None = None):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        # Creates this process's files, in which every metric without labels is 0.
        from npuserve.service import metrics, metrics_file
        from npuserve.service.supervisor.page_text import PageText
        from npuserve.service.supervisor.vllm_metrics import Aliases

        for counter, known in metrics.KNOWN.items():
            for labels in known:
                counter.labels(*labels)
        metrics.target_seconds.labels("ttft").set(config.target_ttft_seconds)
        metrics.target_seconds.labels("itl").set(config.target_itl_seconds)
        metrics.requests_limit.labels("running").set(config.max_num_seqs)
        metrics.requests_limit.labels("waiting").set(config.max_queue)
        if no_space := metrics_file.store():
            raise ConfigError(f"TMPDIR: {folder} cannot hold the metrics files: {no_space.strerror}")
        self._processes = processes
        self._more = more
        self._measured: set[str] = set()  # names of processes with a sample of their memory
        self._metrics = metrics
        self._model = ""
        self._folder = folder
        self._files_lock = threading.Lock()  # scrapes run in another thread
        self._unreadable: set[str] = set()  # broken files that were counted and logged
        self._dead: set[int] = set()  # dead processes whose files still exist
        self._last_beat = time.monotonic()
        self._text = PageText(folder, _declared(), self._skip)
        self._changed: set[str] = set()  # names of metrics that have changed since the last page
        self._aliases = Aliases(self._text.families, config.metrics_vllm_aliases)
        host = config.metrics_host or config.host
        port = config.metrics_port
        try:
            with probe.malformed_name_error():
                self._server = MetricsServer(host.strip("[]"), port, self.page)
        except OSError as error:
            setting = "metrics_port"
            name = endpoint(host, port)
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                setting = "metrics_host" if config.metrics_host else "host"
                name = host
            raise ConfigError(f"{setting}: {probe.listening_failure(name, error)}") from None
        self.url = f"http://{endpoint(host, self._server.port)}/metrics"

    def page(self) -> str:
        """Return the page as of now. Raises OSError if the system lacks a file or memory."""
        from prometheus_client.utils import floatToGoString

        from npuserve.service.supervisor.page_text import header

        more = self._more() if self._more else ""
        self._measure_memory()
        disk = os.statvfs(self._folder)
        self._metrics.disk_free_bytes.set(disk.f_bavail * disk.f_frsize)
        self._metrics.flush()
        if self._dead:
            self._merge_dead()
        with self._files_lock:
            self._refresh()
            changed = self._changed
            self._changed = set()
            age = max(0.0, time.monotonic() - self._last_beat)
            return "".join((
                self._aliases.text(changed, self._model) if self._model else "",
                *(family.text for name, family in self._text.families.items() if name != HEARTBEAT),
                header(AGE, "gauge", "Time since the engine's last heartbeat"), f"{AGE} {floatToGoString(age)}\n",
                more))

    def engine_restarted(self) -> None:
        """Count a restart of the engine."""
        self._metrics.engine_restarts_total.inc()

    def failed(self, process: str, why: str) -> None:
        """Count a failed child process.

        process: engine or frontend.
        why: see restart_policy.Why.
        """
        self._metrics.process_failures_total.labels(process, why).inc()

    def loading(self, seconds: float) -> None:
        """Set the time for which the engine has been loading; 0 when it is not."""
        self._metrics.engine_loading_seconds.set(seconds)

    def built(self, backend: str, model: str) -> None:
        """Publish the loaded model.

        backend: backend of the engine.
        model: served name of the model.
        """
        self._model = model
        self._metrics.build_info.labels(version("npuserve"), version("torch"), backend, model).set(1)

    def forget(self, pid: int) -> None:
        """Keep the counts of a dead process, drop its gauges, and remove its files.

        If the system has no file or memory for this now, it is done at a later scrape.
        """
        self._dead.add(pid)
        with contextlib.suppress(OSError):
            self._merge_dead()

    def _merge_dead(self) -> None:
        """Keep the counts of dead processes, and remove their files. Raises OSError."""
        with self._files_lock:
            self._refresh()  # reads their last values
            for pid in self._dead.difference(self._processes().values()):
                for file in list(self._folder.iterdir()):  # glob may hide an OSError
                    if not file.name.endswith(f"_{pid}.db"):
                        continue
                    file.unlink()
                    if not file.name.startswith("gauge"):
                        self._text.keep(file.name)
                    self._unreadable.discard(file.name)
                self._dead.discard(pid)
            self._refresh()  # closes the removed files, so that their space is free for the next process

    def close(self) -> None:
        self._server.close()

    def _measure_memory(self) -> None:
        processes = {"supervisor": os.getpid(), **self._processes()}
        self._measured |= processes.keys()
        for name in self._measured:
            used = resident_bytes(processes[name]) if name in processes else 0
            self._metrics.resident_memory_bytes.labels(name).set(used)

    def _refresh(self) -> None:
        """Read the files, and store the latest heartbeat. Needs `_files_lock`. Raises OSError."""
        self._changed |= self._text.refresh()
        for beat in self._text.values(HEARTBEAT):
            self._last_beat = max(self._last_beat, beat)

    def _skip(self, name: str, error: Exception) -> None:
        """Count and log a broken file, once."""
        if name not in self._unreadable:
            self._unreadable.add(name)
            self._metrics.metrics_files_skipped_total.inc()
            logs.event(log, "a metrics file cannot be read and is skipped", level=logging.ERROR, file=name,
                       error=f"{type(error).__name__}: {error}")


def _declared() -> list[tuple[str, str, str]]:
    """Return name, type and help of each of our metrics, in the order of their definition."""
    from prometheus_client.metrics import MetricWrapperBase

    from npuserve.service import metrics

    declared = [metric for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)
             for metric in value.describe()]
    return [(metric.name, metric.type, metric.documentation) for metric in declared]
