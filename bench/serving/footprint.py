"""Start-up time and memory of a served model.

    python bench/serving/footprint.py [MODEL] [npuserve serve flags]

Prints one JSON object:

    read_seconds           time to read the weight files once, just before the start
    first_health_seconds   from the start to the first answer of the health service
    ready_seconds          from the start to readiness
    processes              of each process: resident and peak bytes, and the resident bytes of its weights, where they
                           are in a file in memory that a restart maps
    engine_peak_bytes      peak (VmHWM) of the engine after a prompt as long as the context, at most 4096 tokens, and a
                           full batch
    check                  output of `npuserve check --json`, whose peak_bytes predicts engine_peak_bytes

Run the program twice, so that the page cache is warm.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import ranks_of
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2, model_pb2
from npuserve.v1 import inference_service_pb2_grpc as rpc


def read_seconds(folder: Path) -> float:
    began = time.monotonic()
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as data:
            while data.read(1 << 24):
                pass
    return time.monotonic() - began


def memory(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(re.search(rf"{key}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
             for name, key in (("rss_bytes", "VmRSS"), ("peak_bytes", "VmHWM"))}
    return found | {"weights_bytes": mapped_weights(pid)}


def mapped_weights(pid: int) -> int:
    """Return the resident bytes of the file in memory with a process's weights; 0 for none."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(size) << 10 for mapping in mappings if "memfd:npuserve-weights" in mapping.partition("\n")[0]
               for size in re.findall(r"^Rss: +(\d+) kB", mapping, re.MULTILINE))


def memory_by_process(supervisor: int) -> dict[str, dict[str, int]]:
    """Return the memory of the supervisor, its children and the engine's other ranks, by name."""
    listing = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(supervisor)],
                             capture_output=True, text=True, check=True).stdout
    processes = {"supervisor": memory(supervisor)}
    for line in listing.splitlines():
        if match := re.search(r"npuserve\.service\.(\w+)", line):
            processes[match.group(1)] = memory(int(line.split()[0]))
    for number, pid in enumerate(ranks_of(supervisor), 1):
        processes[f"rank-{number}"] = memory(pid)
    return processes


def measure(arguments: list[str]) -> dict[str, Any]:
    """Serve a model with these arguments of `npuserve serve`, and return the measured figures."""
    folder = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else FOLDER
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading = read_seconds(folder)
    check = subprocess.run([sys.executable, "-m", "npuserve.cli", "check", *arguments, "--json"],
                           capture_output=True, text=True)
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "npuserve.cli", "serve", *arguments, "--port", str(port),
         "--metrics-port", "0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[
            ("grpc.initial_reconnect_backoff_ms", 10), ("grpc.max_reconnect_backoff_ms", 20),
            ("grpc.min_reconnect_backoff_ms", 10)])
        health = health_pb2_grpc.HealthStub(channel)

        def until(service: str, status: int) -> float:
            while server.poll() is None:
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                    if answer.status == status:
                        return time.monotonic() - began
                except grpc.RpcError:
                    pass
                time.sleep(0.005)
            raise SystemExit(f"the server did not start:\n{check.stdout}{check.stderr}")

        first_health = until("npuserve.liveness", health_pb2.HealthCheckResponse.SERVING)
        ready = until("npuserve.readiness", health_pb2.HealthCheckResponse.SERVING)
        stub = rpc.InferenceServiceStub(channel)
        info = stub.GetModelInfo(model_pb2.GetModelInfoRequest())

        def ask(length: int) -> None:
            request = generate_pb2.GenerateRequest()
            request.token_ids.ids.extend((17 * i) % info.vocabulary_size for i in range(length))
            request.stopping.max_tokens = 8
            request.stopping.ignore_eos = True
            stub.Generate(request, timeout=600)

        ask(min(info.max_model_len - 8, 4096))
        with ThreadPoolExecutor(info.max_num_seqs) as threads:
            list(threads.map(ask, [32] * info.max_num_seqs))
        processes = memory_by_process(server.pid)
        return {
            "model": folder.name, "read_seconds": round(reading, 3), "first_health_seconds": round(first_health, 3),
            "ready_seconds": round(ready, 3), "processes": processes,
            "engine_peak_bytes": processes["engine"]["peak_bytes"],
            "check": json.loads(check.stdout) if check.stdout.strip().startswith("{") else check.stderr}
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [MODEL] [npuserve serve flags]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    print(json.dumps(measure(parser.parse_known_args()[1])))
