"""What an operator sees in each of an outage's situations: alerts with their times, and the first row of the dashboard.

    python bench/reliability/situations.py [--seconds 540] [--only NAME,...] [--json FILE] [--picture FILE]

Each situation is injected in real servers with a namespace of its own, and all are scraped by one Prometheus that
evaluates the chart's rules. What kube-state-metrics reports in some situations is served by this program to a second
Prometheus. Exit code 1 if an expected alert did not fire, or another critical one did.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads

# isort: split
import argparse
import contextlib
import datetime
import http.server
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from npuserve.cli.main import main as npuserve
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from npuserve.v1 import prompt_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.full_disk import Filler, small_disk
from bench.reliability.monitoring import RULES, free_port, running, wait_for
from bench.reliability.panels import Stat, ask, draw_first_rows, first_row
from bench.serving.server import Serving, descendants, engine_of, serving

SCRAPE_SECONDS = 5
PROMETHEUS = """
global: {{scrape_interval: {seconds}s, scrape_timeout: {seconds}s, evaluation_interval: 10s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: npuserve
    honor_labels: true
    file_sd_configs: [{{files: ["{folder}/targets-*.json"], refresh_interval: 2s}}]
"""
CERTIFICATE_SECONDS = 100


@dataclass
class Place:
    """Servers of a situation. stop: set when the situation ends. calls: number of the calls so far by code."""

    folder: Path
    servers: list[Serving] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    calls: dict[str, int] = field(default_factory=dict)

    def call(self, number: int = 0, tokens: int = 5, timeout: float | None = None, key: str = "") -> None:
        """Send one request to a server, and count its code."""
        message = pb.GenerateRequest(
            token_ids=prompt_pb2.TokenIds(ids=range(100, 120)),
            stopping=pb.StoppingParams(max_tokens=tokens, ignore_eos=True))
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        code = "OK"
        with grpc.insecure_channel(self.servers[number].target) as channel:
            try:
                rpc.InferenceServiceStub(channel).Generate(message, timeout=timeout, metadata=metadata)
            except grpc.RpcError as error:
                code = error.code().name  # type: ignore[attr-defined]
        self.calls[code] = self.calls.get(code, 0) + 1

    def load(self, clients: int, pause: float, **call: Any) -> None:
        """Send requests from several clients until the situation ends."""
        def client() -> None:
            while not self.stop.wait(pause):
                self.call(**call)

        for _ in range(clients):
            threading.Thread(target=client, daemon=True).start()


def kill(server: Serving) -> None:
    os.kill(server.pid, signal.SIGKILL)


def freeze(place: Place) -> None:
    """Stop all processes of the second server, as the loss of its node does for clients."""
    for pid in (place.servers[1].pid, *(pid for pid, _ in descendants(place.servers[1].pid))):
        os.kill(pid, signal.SIGSTOP)


def crash_loop(place: Place) -> None:
    place.load(1, 0.5)
    for _ in range(3):
        while not (engine := engine_of(place.servers[0].pid)):
            time.sleep(0.2)
        os.kill(engine, signal.SIGKILL)
        place.stop.wait(25)


def deadlines(place: Place) -> None:
    """Keep the only place taken, and send requests that cannot begin in time."""
    place.load(2, 0.0, tokens=400)
    time.sleep(10)
    place.load(1, 0.2, timeout=0.06)


def break_keys(place: Place) -> None:
    (place.folder / "keys.toml").write_text("not = [valid")


def fill_disk(place: Place) -> None:
    """Fill the disk, then use metrics with new labels, which need space."""
    place.load(1, 0.5)
    Filler(place.folder / "disk").start()
    for server in place.servers:
        os.kill(engine_of(server.pid), signal.SIGKILL)


def certificate(folder: Path) -> list[str]:
    """Write a certificate that ends in CERTIFICATE_SECONDS; return the server's flags."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(seconds=CERTIFICATE_SECONDS)).sign(key, hashes.SHA256()))
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return ["--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem"]


def keys(folder: Path) -> list[str]:
    npuserve(["keys", "add", f"{folder}/keys.toml", "alice"])
    return ["--api-keys", f"{folder}/keys.toml"]


@dataclass(frozen=True)
class Situation:
    """An outage, and the alerts that it must cause; no other critical ones may fire.

    inject: called once the servers are ready and scraped; None for a situation that `cluster` reports.
    flags: settings of the servers, or a function that returns them, given the situation's folder.
    cluster: lines of kube-state-metrics before and after the injection.
    """

    expected: tuple[str, ...]
    inject: Callable[[Place], object] | None = None
    servers: int = 1
    flags: list[str] | Callable[[Path], list[str]] = field(default_factory=list)
    cluster: tuple[str, str] | None = None
    has_small_disk: bool = False


def cluster(name: str, wanted: tuple[int, int], available: tuple[int, int], after: str = "") -> tuple[str, str]:
    """Return kube-state-metrics' lines of a Deployment with one pod, before and after. after: further lines then."""
    labels = f'namespace="{name}"'
    constant = (
        f'kube_pod_container_resource_requests{{{labels},pod="p",container="npuserve",resource="cpu"}} 1\n'
        f'kube_pod_owner{{{labels},pod="p",owner_kind="ReplicaSet",owner_name="r"}} 1\n'
        f'kube_replicaset_owner{{{labels},replicaset="r",owner_kind="Deployment",owner_name="llm"}} 1\n')
    both = [
        f'{constant}kube_deployment_spec_replicas{{{labels},deployment="llm"}} {wanted[moment]}\n'
        f'kube_deployment_status_replicas_available{{{labels},deployment="llm"}} {available[moment]}\n'
        for moment in (0, 1)]
    return both[0], both[1] + after


BUSY = ["--max-num-seqs", "1"]
SITUATIONS = {
    "up": Situation((), lambda place: place.load(2, 0.5)),
    "all-gone": Situation(("NpuserveNoReadyServer", "NpuserveServerDown"), lambda place: [
        kill(server) for server in place.servers], 2),
    "one-of-two-gone": Situation(("NpuserveServerDown",), lambda place: kill(place.servers[1]), 2),
    "lost-node": Situation(("NpuserveServerDown",), freeze, 2),
    "workload-gone": Situation(("NpuserveNoReadyServer",), cluster=cluster("workload-gone", (2, 2), (2, 0))),
    "scaled-to-zero": Situation((), cluster=cluster("scaled-to-zero", (1, 0), (1, 0))),
    "stuck-drain": Situation(("NpuserveDrainStuck",), cluster=cluster(
        "stuck-drain", (2, 2), (2, 1), 'kube_pod_deletion_timestamp{namespace="stuck-drain",pod="p"} NOW\n')),
    "crash-loop": Situation(("NpuserveRestartLoop",), crash_loop),
    "hanging-engine": Situation(
        ("NpuserveEngineDown", "NpuserveNoReadyServer"),
        lambda place: os.kill(engine_of(place.servers[0].pid), signal.SIGSTOP), flags=["--hang-seconds", "600"]),
    "full-queue": Situation(("NpuserveQueueRejecting", "NpuserveRefusalsBurn"), lambda place: place.load(
        6, 0.2, tokens=400), flags=[*BUSY, "--max-queue", "1"]),
    "deadlines": Situation(("NpuserveQueueRejecting", "NpuserveRefusalsBurn"), deadlines, flags=BUSY),
    "wrong-keys": Situation(("NpuserveRefusalsBurn",), lambda place: place.load(1, 0.3, key="old"), flags=keys),
    "broken-keys": Situation(("NpuserveSettingsUnusable",), break_keys, flags=keys),
    "expired-certificate": Situation(("NpuserveCertificateExpired",), lambda place: None, flags=certificate),
    "full-disk": Situation(("NpuserveDiskFull",), fill_disk, has_small_disk=True),
    "slow": Situation(("NpuserveTtftHigh",), lambda place: place.load(4, 0.0, tokens=400), flags=[
        *BUSY, "--target-ttft-seconds", "0.1"]),
}


class ClusterPage:
    """Page of kube-state-metrics for the situations that have one. injected: Unix time of the injection; 0: not yet."""

    def __init__(self, pages: list[tuple[str, str]]):
        page = self
        self.injected = 0.0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = "".join(after if page.injected else before for before, after in pages)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(lines.replace("NOW", str(page.injected)).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes the targets-*.json of a folder. Yield its address."""
    folder.mkdir()
    (folder / "prometheus.yml").write_text(PROMETHEUS.format(seconds=SCRAPE_SECONDS, rules=RULES, folder=folder))
    base = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address={base.removeprefix('http://')}"]
    with running(command, folder / "log") as process:
        wait_for(r"(ready to receive web requests)", folder / "log", process)
        yield base


def add_target(folder: Path, name: str, targets: list[str], labels: dict[str, str]) -> None:
    (folder / f"targets-{name}.json").write_text(json.dumps([{"targets": targets, "labels": labels}]))


def as_text(row: list[Stat]) -> dict[str, str]:
    """Return the first row of the dashboard as text: title -> names with values."""
    return {stat.title: ", ".join(f"{cell.name} {cell.text}" for cell in stat.cells) or stat.no_data for stat in row}


def firing(base: str) -> set[tuple[str, str, str]]:
    """Return (namespace, alert, severity) of the alerts that fire now."""
    alerts = ask(base, "alerts")["alerts"]
    return {(alert["labels"].get("namespace", ""), alert["labels"]["alertname"], alert["labels"]["severity"])
            for alert in alerts if alert["state"] == "firing"}


def observe(bases: list[str], begin: float, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Watch alerts; return namespace -> alert and severity -> seconds after the injection of each begin and end."""
    times: dict[str, dict[str, list[float]]] = {}
    before: set[tuple[str, str, str]] = set()
    while time.time() < begin + seconds:
        now = set().union(*(firing(base) for base in bases))
        for namespace, alert, severity in now ^ before:
            moments = times.setdefault(namespace, {}).setdefault(f"{severity} {alert}", [])
            moments.append(round(time.time() - begin))
        before = now
        time.sleep(2)
    return times


def verdict(situation: Situation, alerts: dict[str, list[float]]) -> str:
    """Return what is wrong: an alert that is missing, or a critical one that is not expected."""
    fired = {name.split()[1]: name.split()[0] for name in alerts}
    missing = [name for name in situation.expected if name not in fired]
    wrong = [name for name, severity in fired.items() if severity == "critical" and name not in situation.expected]
    return "; ".join([f"missing: {name}" for name in missing] + [f"not expected: {name}" for name in wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="time after the injection (default: %(default)s)")
    parser.add_argument("--only", default="", help="situations, separated by commas (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the first row of each situation to FILE")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or list(SITUATIONS)
    if unknown := [name for name in names if name not in SITUATIONS]:
        parser.error(f"--only: {', '.join(unknown)}: no such situation; there are {', '.join(SITUATIONS)}")
    chosen = {name: SITUATIONS[name] for name in names}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers, cluster_base = (stack.enter_context(prometheus(folder / name)) for name in ("servers", "cluster"))
        page = ClusterPage([situation.cluster for situation in chosen.values() if situation.cluster])
        add_target(folder / "cluster", "cluster", [f"127.0.0.1:{page.server.server_port}"], {})
        places = {name: start(stack, folder, name, situation) for name, situation in chosen.items()
                  if situation.inject}
        time.sleep(60)  # recording rules know the servers
        begin = page.injected = time.time()
        for name, place in places.items():
            threading.Thread(target=SITUATIONS[name].inject, args=(place,), daemon=True).start()  # type: ignore[arg-type]
        times = observe([servers, cluster_base], begin, args.seconds)
        rows = {name: first_row(servers if name in places else cluster_base, name) for name in chosen}
        table = {
            name: {"alerts": times.get(name, {}), "wrong": verdict(situation, times.get(name, {})),
                   "calls": places[name].calls if name in places else {},
                   "first row": as_text(rows[name])}
            for name, situation in chosen.items()}
        for place in places.values():
            place.stop.set()
            for server in place.servers:
                with contextlib.suppress(ProcessLookupError):
                    kill(server)
    if args.picture:
        day = datetime.date.today()
        draw_first_rows(rows, args.picture, f"First row of Operators, {args.seconds:.0f} s after the outage, {day}")
    text = json.dumps(table, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return int(any(row["wrong"] for row in table.values()))


def start(stack: contextlib.ExitStack, folder: Path, name: str, situation: Situation) -> Place:
    """Start the servers of a situation, and add them to Prometheus' targets."""
    place = Place(folder / name)
    place.folder.mkdir()
    environment = {}
    if situation.has_small_disk:
        (place.folder / "disk").mkdir()
        environment["TMPDIR"] = str(stack.enter_context(small_disk(place.folder / "disk")))
    flags = situation.flags(place.folder) if callable(situation.flags) else situation.flags
    for _ in range(situation.servers):
        place.servers.append(stack.enter_context(serving("", flags, environment=environment)))
    targets = ["{}:{}".format(*server.metrics_address) for server in place.servers]
    add_target(folder / "servers", name, targets, {"namespace": name})
    return place


if __name__ == "__main__":
    sys.exit(main())
