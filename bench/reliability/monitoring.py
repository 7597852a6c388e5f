"""Metrics, dashboards and alert rules, checked by a Prometheus that scrapes a server under load.

    python bench/reliability/monitoring.py [MODEL] [--seconds 600] [--trace FILE] [--pictures FOLDER] [--json FILE]
        [-- FLAGS]

Starts `npuserve serve` with two front ends, and a Prometheus (Debian's package, or --prometheus) that scrapes it and
evaluates the chart's alert rules. The load is a trace's arrivals (`npuserve bench serve --trace`), or a Poisson process
without a trace. Some clients disconnect in the middle, send invalid requests, reuse an id, constrain the answer, or
arrive in a burst. At half time the engine is killed. Exit code 1 if one of these does not hold:

  - `promtool check metrics` accepts the live page, apart from the colons in vLLM's names;
  - every query of every panel of every dashboard has a number over the run, except queries that need TLS or a gateway;
  - no counter decreases, also not by the engine's death, and no alert rule fails;
  - the kernels' time fits the time of the steps in which they were timed.

FLAGS are settings of the server.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from npuserve.cli.bench.load_generator import Load
from npuserve.cli.bench.workload import Prompts, TimedRequest, cut_to_context, poisson, read_trace
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from npuserve.v1 import prompt_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.panels import ask, draw, fetch, values
from bench.serving.server import arguments, engine_of, stop

INSTRUCTIONS = 128  # tokens
RULES = Path(__file__).parents[2] / "helm/npuserve/rules/npuserve.yaml"
EMPTY_HERE = ("Certificates", "Calls of gateways", "Errors to gateways", "Lag of lengths", "Health", "Temperature",
              "Device memory", "AI cores", "Power", "Fault code", "Kernels that fall back", "GPU utilization",
              "GPU temperature", "GPU memory", "GPU power", "GPU clock", "GPU fault", "Refused, by reason",
              "Firing alerts", "Imbalance of experts", "Host memory hits",
              "Store hits")
PICTURES = {  # picture -> dashboard and titles of its panels
    "service": ("operators", [
        "Calls by code", "Tokens", "Time to first token", "Inter-token latency", "Where the time goes", "Requests",
        "KV-cache blocks", "Engine's last sign of life"]),
    "engine": ("kernels", [
        "Steps", "Share of time", "Decode step, spread", "Decode batch", "Host gap", "Tokens a step"]),
    "kernels": ("kernels", [
        "Share of the step", "Covered by kernels", "Mean by kernel", "p50 by kernel", "p99 by kernel", "All kernels"]),
}
PROM_CONFIG = """
global: {{scrape_interval: {interval}s, evaluation_interval: {interval}s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: npuserve
    static_configs: [{{targets: ["{target}"], labels: {{namespace: bench}}}}]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            yield process
        finally:
            stop(process)


def wait_for(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until a log matches the pattern, and return its first group."""
    while not (found := re.search(pattern, log.read_text())):
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return found[1]


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def ours(page: str) -> str:
    """Return the lines of a metrics page without the metrics under vLLM's names."""
    return "".join(line for line in page.splitlines(keepends=True) if "vllm:" not in line)


# The load


def workload(args: argparse.Namespace, context: int) -> list[TimedRequest]:
    if args.trace:
        requests = read_trace(args.trace, 0, args.time_scale)
    else:
        requests = poisson(int(4 * args.seconds), 4.0, 200, 100, 0)
    early = [one for one in requests if one.arrival < args.seconds]
    requests = cut_to_context(early, args.max_prompt, args.max_output, context)[0]
    # Longer prompts begin with one of four instructions.
    return [replace(one, hashes=(number % 4, 4 + number), hash_tokens=INSTRUCTIONS)
            if one.prompt_tokens > INSTRUCTIONS else one for number, one in enumerate(requests)]


async def misbehave(target: str, engine: int, seconds: float) -> None:
    """Disturb the server: each kind of misbehaving client several times, and one kill of the engine."""
    def wanted(tokens: int, **fields: Any) -> pb.GenerateRequest:
        ids = prompt_pb2.TokenIds(ids=range(100, 150))
        return pb.GenerateRequest(
            token_ids=ids, stopping=pb.StoppingParams(max_tokens=tokens, ignore_eos=True), **fields)

    async with grpc.aio.insecure_channel(target) as channel:
        stub = rpc.InferenceServiceStub(channel)

        async def quietly(message: pb.GenerateRequest) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Generate(message)

        async def leave() -> None:
            call = stub.StreamGenerate(wanted(400))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await call.read()
                call.cancel()

        turns = 8
        for turn in range(turns):
            began = time.monotonic()
            await asyncio.gather(*(leave() for _ in range(3)))
            await quietly(wanted(5, sampling=pb.SamplingParams(top_p=7.0)))
            await asyncio.gather(*(quietly(wanted(50, request_id=f"twice-{turn}")) for _ in range(2)))
            await quietly(wanted(20, regex=rf"[a-z ]{{{100 + turn},}}"))
            if turn % 3 == 1:
                await asyncio.gather(*(quietly(wanted(20)) for _ in range(80)))
            if turn == turns // 2:
                os.kill(engine, signal.SIGKILL)
            await asyncio.sleep(max(0.0, seconds / turns - (time.monotonic() - began)))


async def load_it(args: argparse.Namespace, target: str, engine: int) -> dict[str, Any]:
    """Run the load; return how its requests ended."""
    load = Load(target, 4, 0.0, 0)
    try:
        model = await load.model_info()
        requests = workload(args, model.max_model_len)
        prompts, stop = Prompts(model.vocabulary_size, model.eos_token_ids, 0), asyncio.Event()
        sending = asyncio.ensure_future(load.run(requests, prompts, stop))
        misbehaving = asyncio.ensure_future(misbehave(target, engine, args.seconds))
        await asyncio.sleep(args.seconds)
        await misbehaving
        stop.set()
        await sending
        tokens = sum(outcome.generated_tokens for outcome in load.outcomes)
        return {"requests": len(load.outcomes), "tokens": tokens,
                "codes": dict(Counter(outcome.code for outcome in load.outcomes))}
    finally:
        await load.close()


# The verdict


def judge(base: str, begin: float, end: float, interval: float, args: argparse.Namespace) -> dict[str, Any]:
    span = max(int(end - begin), 1)
    variables = {
        "namespace": "bench", "model": ".*", "instance": ".*", "kernel": ".*", "phase": ".*",
        "__rate_interval": f"{max(4 * interval, 4):g}s", "baseline": f"{max(span // 5, 4)}s",
    }
    panels = fetch(base, begin, end, max(1.0, span / 120), variables)
    for picture, (dashboard, titles) in PICTURES.items():
        if args.pictures:
            own = {panel.title: panel for panel in panels if panel.dashboard == dashboard}
            chosen = [own[title] for title in titles]
            draw(chosen, begin, args.pictures / f"dashboard-{picture}.png",
                 f"npuserve / {dashboard.capitalize()}, {args.title}; seconds of the run")
    names = [name for name in ask(base, "label/__name__/values")
             if re.fullmatch(r"npuserve_.*_(total|count|sum|bucket)", name)]
    resets = [(name, *found) for name in names for found in values(base, f"resets({name}[{span}s])")]
    rules = [rule for group in ask(base, "rules")["groups"] for rule in group["rules"]]
    kernels, steps = (f"sum by (phase) (npuserve_{name})" for name in (
        "kernel_latency_seconds_sum", "timed_step_seconds_total"))
    fired = values(base, f"count by (alertname, alertstate) (last_over_time(ALERTS[{span}s]))")
    return {
        "panels": len(panels), "lines": sum(len(panel.series) for panel in panels),
        "empty": [f"{panel.dashboard}: {panel.title}: {name}" for panel in panels for name in panel.empty
                  if panel.title not in EMPTY_HERE],
        "series": values(base, 'count ({__name__=~"npuserve_.*"})')[0][1],
        "counters": len(resets), "counters_gone_back": [(name, labels) for name, labels, count in resets if count],
        "failed_scrapes": values(base, f"count_over_time((up == 0)[{span}s:]) or on() vector(0)")[0][1],
        "scrape_seconds": values(base, f"avg_over_time(scrape_duration_seconds[{span}s])")[0][1],
        "rules": sum(rule["health"] == "ok" for rule in rules),
        "rules_failing": [rule["name"] for rule in rules if rule["health"] == "err"],
        "alerts": sorted(f"{labels['alertname']} ({labels['alertstate']})" for labels, _ in fired),
        "engine_restarts": values(base, "sum (npuserve_engine_restarts_total)")[0][1],
        "kernels_of_step": {labels["phase"]: round(value, 4) for labels, value in values(base, f"{kernels} / {steps}")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model to serve (default: the built-in model)")
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the run (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="Azure or Mooncake trace (default: four requests per second)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of the trace (default: %(default)s)")
    parser.add_argument("--max-prompt", type=int, default=256, help="tokens (default: %(default)s)")
    parser.add_argument("--max-output", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write pictures of the main panels to FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdict to FILE")
    parser.add_argument("--prometheus", default="prometheus", help="program to run (default: %(default)s)")
    args, flags = arguments(parser)
    if not shutil.which(args.prometheus):
        parser.error(f"there is no {args.prometheus}: apt-get install prometheus")
    args.title = f"{args.seconds:.0f} s of {'the trace ' + args.trace.stem if args.trace else 'Poisson arrivals'}"
    interval = 5.0 if args.seconds >= 300 else 1.0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [
            sys.executable, "-m", "npuserve.cli", "serve", *([args.model] if args.model else []), "--port", "0",
            "--metrics-port", "0", "--frontends", "2", "--max-num-seqs", "16", "--max-queue", "32", "--log-format",
            "text", "--kernel-sampling", "8", "--speculate", "suffix", *flags]
        server = stack.enter_context(running(command, folder / "server.log"))
        target = wait_for(r"listening on (\S+)", folder / "server.log", server)
        url = wait_for(r"metrics=(\S+)", folder / "server.log", server)
        (folder / "prometheus.yml").write_text(PROM_CONFIG.format(
            interval=f"{interval:g}", rules=RULES, target=url.removeprefix("http://").removesuffix("/metrics")))
        base = f"http://127.0.0.1:{free_port()}"
        prometheus = stack.enter_context(running(
            [args.prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={base.removeprefix('http://')}"], folder / "prometheus.log"))
        wait_for(r"(ready to receive web requests)", folder / "prometheus.log", prometheus)
        wait_for(r"(ready in)", folder / "server.log", server)
        begin = time.time()
        outcome = asyncio.run(load_it(args, target, engine_of(server.pid)))
        time.sleep(2 * interval)
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=ours(page(url)), capture_output=True, text=True, check=False)
        verdict = {"load": outcome, "promtool": (checked.stdout + checked.stderr).strip() or "clean",
                   **judge(base, begin, time.time(), interval, args)}
        said = "\n".join(line for line in (folder / "server.log").read_text().splitlines() if " INFO " not in line)
    text = json.dumps(verdict, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    wrong = [name for name in ("empty", "counters_gone_back", "rules_failing") if verdict[name]]
    wrong += ["promtool"] if verdict["promtool"] != "clean" else []
    wrong += ["engine_restarts"] if verdict["engine_restarts"] != 1 else []
    print(f"{said}\nFAILED: {', '.join(wrong)}" if wrong else "passed", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
