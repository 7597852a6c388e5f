"""Metrics page over several processes: sums, and the files of dead processes.

Each page runs in a process of its own, because prometheus_client reads its environment only once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from npuserve.service.supervisor.metrics_page import AGE, HEARTBEAT
from tests.service.test_metrics import DOCUMENT, documented

# Server process with two children that write metrics; one dies. Prints its pages before and after.
SERVER = """
import json, os, subprocess, sys, time, urllib.request
from pathlib import Path
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.metrics_page import MetricsPage

CHILD = '''
import sys, time
from npuserve.service import metrics
me = int(sys.argv[1])
metrics.requests_total.labels("Generate", "OK").inc(me)
metrics.prompt_tokens_total.inc(10 * me)
metrics.requests_running.set(me)
metrics.kv_cache_blocks.labels("free").set(100 * me)
metrics.request_finish_total.labels("eos").inc(me)
metrics.request_finish_total.labels("stop_string").inc(1)
metrics.step_tokens.labels("decode").observe(me)
metrics.step_tokens.labels("prefill").observe(100)
metrics.queue_time_seconds.observe(0.3)
if me == 2:
    metrics.engine_heartbeat.set(time.monotonic() - 1000)
    metrics.engine_heartbeat.set(time.monotonic())
    metrics.kv_cache_config_info.labels("16", "512").set(1)
    metrics.kv_cache_usage_ratio.set(0.25)
print("written", flush=True)
sys.stdin.read()
'''
living = {}
config = ServerConfig(metrics_port=0, metrics_vllm_aliases=len(sys.argv) > 2, max_num_seqs=48, max_queue=96)
page = MetricsPage(Path(sys.argv[1]), config, lambda: living)
scrape = lambda: urllib.request.urlopen(page.url).read().decode()
environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": sys.argv[1]}
pages = [scrape()]
children = [subprocess.Popen([sys.executable, "-c", CHILD, str(me)], stdin=-1, stdout=-1, env=environment)
            for me in (1, 2)]
for child in children:
    child.stdout.readline()
page.built("cpu", "teller")
living["engine"] = children[1].pid
pages.append(scrape())
children[1].kill()
children[1].wait()
living.clear()
page.forget(children[1].pid)
page.engine_restarted()
pages.append(scrape())
children[0].communicate()
page.close()
print(json.dumps(pages))
"""


# Server process whose children die one after another while a thread scrapes. Prints the number of files after each
# death, the scraped sums, and the last page.
DEATHS = """
import json, os, subprocess, sys, threading, urllib.request
from pathlib import Path
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.metrics_page import MetricsPage

CHILD = '''
import os
from npuserve.service import metrics
metrics.prompt_tokens_total.inc(10)
metrics.requests_running.set(1)
metrics.queue_time_seconds.observe(0.3)
metrics.requests_total.labels("Generate", "OK").inc()
os._exit(1)
'''
folder, deaths = Path(sys.argv[1]), int(sys.argv[2])
page = MetricsPage(folder, ServerConfig(metrics_port=0))
scrape = lambda: urllib.request.urlopen(page.url).read().decode()
seen, over = [], threading.Event()

def watch():
    while not over.is_set():
        (line,) = [line for line in scrape().splitlines() if line.startswith("npuserve_prompt_tokens_total ")]
        seen.append(float(line.split()[1]))

watching = threading.Thread(target=watch)
watching.start()
counts = []
for _ in range(deaths):
    child = subprocess.Popen([sys.executable, "-c", CHILD], env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)})
    child.wait()
    page.forget(child.pid)
    counts.append(len(list(folder.glob("*.db"))))
(folder / "counter_4000000.db").touch()  # a process was killed before it set the file's size
page.forget(4000000)
(folder / "counter_4000001.db").touch()  # a process has not set the file's size yet
last = scrape()
over.set()
watching.join()
page.close()
print(json.dumps({"files": counts, "seen": seen, "last": last}))
"""


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page) for sample in family.samples
    }


PICKER = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "vllm:cache_config_info"}


def vllm_kinds(page: str) -> dict[str, str]:
    """Return name -> type of vLLM's metrics on a page."""
    return {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE vllm:")}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the page before any sample, with two children, and after the death of the second child."""
    return run_server(tmp_path_factory.mktemp("metrics"))


def run_server(folder: Path, *options: str) -> list[str]:
    # The page overwrites an inherited variable.
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": "/nowhere"}
    command = [sys.executable, "-c", SERVER, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_metrics_page_uncounted_metric_is_zero(pages: list[str]) -> None:
    first = samples(pages[0])
    for name, (kind, labels) in documented().items():
        if not labels:
            key = f"{name}_count" if kind == "histogram" else name
            if name == AGE:
                assert 0 <= first[key, ()] < 60
            elif name != "npuserve_disk_free_bytes":
                assert first[key, ()] == 0, name


def test_metrics_page_names_every_metric_from_the_start(pages: list[str]) -> None:
    for page in pages:
        named = {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE npuserve_")}
        assert named == {name: kind for name, (kind, _) in documented().items()}


def test_metrics_page_sums_over_processes(pages: list[str]) -> None:
    second = samples(pages[1])
    assert second["npuserve_requests_total", (("code", "OK"), ("rpc", "Generate"))] == 3
    assert second["npuserve_prompt_tokens_total", ()] == 30
    assert second["npuserve_requests_running", ()] == 3
    assert second["npuserve_kv_cache_blocks", (("state", "free"),)] == 300
    assert second["npuserve_queue_time_seconds_count", ()] == 2
    assert second["npuserve_queue_time_seconds_bucket", (("le", "0.25"),)] == 0
    assert second["npuserve_queue_time_seconds_bucket", (("le", "0.5"),)] == 2
    assert 0 <= second[AGE, ()] < 60
    (build,) = [(labels, value) for (name, labels), value in second.items() if name == "npuserve_build_info"]
    assert (dict(build[0])["backend"], dict(build[0])["model"], build[1]) == ("cpu", "teller", 1)


def test_metrics_page_limits_are_the_settings(pages: list[str]) -> None:
    first = samples(pages[0])
    assert first["npuserve_requests_limit", (("state", "running"),)] == 48
    assert first["npuserve_requests_limit", (("state", "waiting"),)] == 96


def test_metrics_page_free_disk_is_that_of_its_folder(pages: list[str], tmp_path: Path) -> None:
    """The other figures of the page may be old on a full disk."""
    disk = shutil.disk_usage(tmp_path)
    for page in pages:
        assert abs(samples(page)["npuserve_disk_free_bytes", ()] - disk.free) < disk.total / 4


def test_metrics_page_memory_of_dead_process_is_zero(pages: list[str]) -> None:
    memory = [{process: samples(page).get(("npuserve_resident_memory_bytes", (("process", process),)))
               for process in ("supervisor", "engine")} for page in pages]
    assert [found["engine"] is None for found in memory] == [True, False, False]
    assert all(1 << 20 < (found["supervisor"] or 0) < 1 << 32 for found in memory)
    assert 1 << 20 < (memory[1]["engine"] or 0) < 1 << 32
    assert memory[2]["engine"] == 0


def test_metrics_page_dead_process_keeps_counts_and_drops_gauges(pages: list[str]) -> None:
    third = samples(pages[2])
    assert third["npuserve_prompt_tokens_total", ()] == 30
    assert third["npuserve_queue_time_seconds_count", ()] == 2
    assert third["npuserve_requests_running", ()] == 1
    assert third["npuserve_kv_cache_blocks", (("state", "free"),)] == 100
    assert third["npuserve_engine_restarts_total", ()] == 1
    # The last heartbeat before its death counts.
    assert samples(pages[1])[AGE, ()] <= third[AGE, ()] < 60


@pytest.mark.slow
def test_metrics_page_many_deaths_keeps_totals_and_file_count(tmp_path: Path) -> None:
    """A scrape at any moment of a merge neither misses nor repeats a count."""
    deaths = 4
    done = subprocess.run([sys.executable, "-c", DEATHS, str(tmp_path), str(deaths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["files"] == [found["files"][0]] * deaths
    assert found["seen"] == sorted(found["seen"])
    assert {value % 10 for value in found["seen"]} == {0}
    last = samples(found["last"])
    assert last["npuserve_prompt_tokens_total", ()] == 10 * deaths
    assert last["npuserve_requests_total", (("code", "OK"), ("rpc", "Generate"))] == deaths
    assert last["npuserve_queue_time_seconds_count", ()] == deaths
    assert last["npuserve_queue_time_seconds_sum", ()] == pytest.approx(0.3 * deaths)
    assert last["npuserve_queue_time_seconds_bucket", (("le", "0.25"),)] == 0
    assert last["npuserve_queue_time_seconds_bucket", (("le", "0.5"),)] == deaths
    assert last["npuserve_requests_running", ()] == 0


def test_metrics_page_alert_series_exist_before_first_event(pages: list[str]) -> None:
    first = samples(pages[0])
    assert first["npuserve_queue_rejections_total", (("why", "queue_full"),)] == 0
    assert first["npuserve_requests_total", (("code", "INTERNAL"), ("rpc", "StreamGenerate"))] == 0
    assert first["npuserve_target_seconds", (("latency", "ttft"),)] == 2
    assert first["npuserve_target_seconds", (("latency", "itl"),)] == 0.2


@pytest.mark.slow
def test_metrics_page_vllm_aliases_have_same_values(tmp_path: Path, pages: list[str]) -> None:
    before, both, last = run_server(tmp_path, "aliases")
    assert "vllm:" not in before, "vLLM has no page before its model is loaded"
    found = samples(both)
    named = (("engine", "0"), ("model_name", "teller"))
    assert found["vllm:num_requests_running", named] == found["npuserve_requests_running", ()] == 3
    assert found["vllm:gpu_cache_usage_perc", named] == 0.25
    assert found["vllm:prompt_tokens_total", named] == 30
    assert found["vllm:request_queue_time_seconds_count", named] == 2
    assert found["vllm:request_queue_time_seconds_bucket", (named[0], ("le", "0.5"), named[1])] == 2
    # Sums over labels that vLLM does not have.
    reasons = {dict(labels)["finished_reason"]: value for (name, labels), value in found.items()
               if name == "vllm:request_success_total"}
    assert reasons == {"stop": 5, "length": 0, "abort": 0}
    assert found["vllm:iteration_tokens_total_count", named] == 4
    assert found["vllm:iteration_tokens_total_sum", named] == 203
    kinds = vllm_kinds(both)
    assert kinds.keys() - vllm_kinds(last).keys() == PICKER
    assert kinds["vllm:num_requests_waiting"] == kinds["vllm:kv_cache_usage_perc"] == "gauge"
    assert kinds["vllm:generation_tokens_total"] == "counter"
    assert kinds["vllm:e2e_request_latency_seconds"] == "histogram"
    described = set(re.findall(r"`(vllm:[a-z0-9_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert {name for name in kinds if not name.startswith("vllm:gpu_prefix")} == described


def test_metrics_page_of_a_live_engine_has_the_pickers_gauges(pages: list[str]) -> None:
    """Without --metrics-vllm-aliases. A dead engine has none: zeros would look like an idle one."""
    assert [vllm_kinds(page) for page in pages] == [{}, dict.fromkeys(PICKER, "gauge"), {}]
    found = samples(pages[1])
    named = (("engine", "0"), ("model_name", "teller"))
    assert found["vllm:num_requests_running", named] == 3
    assert found["vllm:num_requests_waiting", named] == 0
    assert found["vllm:kv_cache_usage_perc", named] == 0.25
    cache = (("block_size", "16"), named[0], named[1], ("num_gpu_blocks", "512"))
    assert found["vllm:cache_config_info", cache] == 1


def test_metrics_page_shows_heartbeat_age_only(pages: list[str]) -> None:
    assert not any(HEARTBEAT in page for page in pages)


def test_metrics_page_promtool_finds_no_problem(pages: list[str]) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("no promtool")
    for page in pages:
        ours = "".join(line for line in page.splitlines(keepends=True) if "vllm:" not in line)  # vLLM's have colons
        done = subprocess.run([promtool, "check", "metrics"], input=ours, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
def test_metrics_page_ipv6_url_has_brackets(tmp_path: Path) -> None:
    script = (
        "import sys, urllib.request\nfrom pathlib import Path\nfrom npuserve.service.config import ServerConfig\n"
        "from npuserve.service.supervisor.metrics_page import MetricsPage\n"
        "page = MetricsPage(Path(sys.argv[1]), ServerConfig(host='::1', metrics_port=0))\n"
        "urllib.request.urlopen(page.url).read(); page.close()\n"
        "print(page.url)")
    url = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True)
    assert url.stdout.startswith("http://[::1]:")


def test_metrics_page_taken_port_raises_config_error(tmp_path: Path, free_port: Callable[[], int]) -> None:
    script = """
import sys
from pathlib import Path
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.supervisor.metrics_page import MetricsPage
config = ServerConfig(metrics_port=int(sys.argv[2]))
first = MetricsPage(Path(sys.argv[1]), config)
try:
    MetricsPage(Path(sys.argv[1]), config)
except ConfigError as error:
    print(error)
first.close()
"""
    port = str(free_port())
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), port], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use; end the")


NO_FILES = """
import json, os, resource, subprocess, sys
from pathlib import Path
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.metrics_page import MetricsPage

folder = Path(sys.argv[1])
page = MetricsPage(folder, ServerConfig(metrics_port=0))
script = "import os\\nfrom npuserve.service import metrics\\nmetrics.prompt_tokens_total.inc(10)\\nos._exit(1)"
pids = []
for _ in range(2):
    variables = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": sys.argv[1]}
    child = subprocess.Popen([sys.executable, "-c", script], env=variables)
    child.wait()
    pids.append(child.pid)
page.forget(pids[0])
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
page.forget(pids[1])
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
left = len(list(folder.glob(f"*_{pids[1]}.db")))
found = {name: float(value) for name, _, value in (line.partition(" ") for line in page.page().splitlines())
         if name in ("npuserve_prompt_tokens_total", "npuserve_metrics_files_skipped_total")}
print(json.dumps([left > 0, len(list(folder.glob(f"*_{pids[1]}.db"))), found]))
os._exit(0)
"""


@pytest.mark.slow
def test_metrics_page_without_file_descriptors_loses_no_counts(tmp_path: Path) -> None:
    """The files of a dead process are merged at the next scrape."""
    done = subprocess.run([sys.executable, "-c", NO_FILES, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = {"npuserve_prompt_tokens_total": 20, "npuserve_metrics_files_skipped_total": 0}
    assert json.loads(done.stdout) == [True, 0, counts]


RESERVED = """
import json, os, sys
from pathlib import Path
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.metrics_page import MetricsPage

folder = Path(sys.argv[1])
sizes = lambda: {file.name: (file.stat().st_size, 512 * file.stat().st_blocks) for file in folder.iterdir()}
page = MetricsPage(folder, ServerConfig(metrics_port=0), lambda: {f"frontend-{n}": os.getpid() for n in range(64)})
before = sizes()
page.failed("engine", "died")
page.engine_restarted()
page.loading(1.0)
page.built("cpu", 64 * "teller")
for kind in ("counter", "gauge_livesum"):
    (folder / f"{kind}_4000000.db").write_bytes(next(folder.glob(f"{kind}_*")).read_bytes())
page.page()
page.forget(4000000)
links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
print(json.dumps([before, sizes(), [link for link in links if "4000000" in link]]))
os._exit(0)
"""


def test_metrics_page_files_of_supervisor_are_reserved_and_do_not_grow(tmp_path: Path) -> None:
    """On a full disk, a write to a mapped page that has no space would end the supervisor by SIGBUS. Files of a dead
    process leave their space to the next one.
    """
    done = subprocess.run([sys.executable, "-c", RESERVED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, opened = json.loads(done.stdout)
    assert opened == []
    assert len(before) == 4
    assert after == before
    assert all(reserved >= size for size, reserved in after.values())
