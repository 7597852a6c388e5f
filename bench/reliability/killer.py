"""A request that crashes or hangs the engine, among innocent streams: only that request may fail.

    python bench/reliability/killer.py [MODEL] [--runs 20] [--streams 32] [--kinds crash-prefill,...] [--json FILE]
        [-- FLAGS]

For each kind of fault one server runs `--streams` innocent streams, and each run adds one faulty request. In each run
the faulty request must fail with INTERNAL and the reason ENGINE_KILLER, after at most three runs of the engine. Each
innocent stream must be complete and equal to the undisturbed one. The server must be up. Exit code 1 otherwise.

    crash-prefill   the step that computes the prompt kills the engine
    hang-prefill    the step that computes the prompt never ends
    crash-decode    each decode step after 100 tokens of the answer kills the engine
    hang-decode     each decode step after 100 tokens of the answer never ends

As on a device, the fault occurs when the step is collected. The previous step has been applied by then. A request with
a fault in decode therefore gets one token in each run of the engine. A hanging engine is killed after 5 s. FLAGS are
settings of the server. With `serve` or `engine` in place of MODEL the program is the server with the faults, or its
engine process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.kills import Answer, asks, stream
from bench.serving.server import serving

KINDS = ("crash-prefill", "hang-prefill", "crash-decode", "hang-decode")
MARK = 511
"""Second token of a faulty prompt; the third one is FIRST_KIND plus the index of the kind."""
FIRST_KIND = 20
DECODED = 100
"""Tokens before a fault in decode."""
MAX_LIVES = 3


def serve(arguments: list[str]) -> int:
    """Run `npuserve serve` with an engine that has the faults."""
    from npuserve.service import logs, settings
    from npuserve.service.supervisor import supervisor

    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    return asyncio.run(supervisor.Supervisor(config, engine=(sys.executable, __file__, "engine")).run())


def engine() -> int:
    """Run the engine process with the faults."""
    from npuserve.npu.execution.runner import Runner
    from npuserve.service.engine import process as engine_process

    faulty: dict[int, tuple[str, int]] = {}  # request -> (kind, tokens of the prompt)
    fatal: list[tuple[Any, str]] = []  # (handle of a step that fails, kind)
    launch, collect = Runner.launch, Runner.collect

    def launch_with_faults(self: Runner, step: Any) -> Any:
        for new in step.new:
            if len(new.prompt_ids) > 2 and new.prompt_ids[1] == MARK:
                faulty[new.request_id] = KINDS[new.prompt_ids[2] - FIRST_KIND], len(new.prompt_ids)
        handle = launch(self, step)
        for row in step.rows:
            kind, prompt = faulty.get(row.request_id, ("", 0))
            fails = row.is_decode and row.start >= prompt + DECODED if "decode" in kind else row.start < prompt
            if kind and fails:
                fatal.append((handle, kind))
        return handle

    def collect_with_faults(self: Runner, handle: Any) -> Any:
        for one, kind in fatal:
            if one is handle:
                if "crash" in kind:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(1e6)
        return collect(self, handle)

    Runner.launch, Runner.collect = launch_with_faults, collect_with_faults  # type: ignore[method-assign]
    code = engine_process.main()
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def innocents(count: int, tokens: int) -> list[Any]:
    """Return varied requests, each of which generates more than two thirds of `tokens`."""
    wanted = asks(count, tokens)
    for number, ask in enumerate(wanted):
        ask.stopping.ignore_eos = True
        ask.stopping.max_tokens = tokens - number % (tokens // 3)
        del ask.stopping.stop[:]
    return wanted


def run_once(server: Any, kind: str, wanted: Sequence[Any], alone: Sequence[Any]) -> dict[str, Any]:
    """Send one faulty request among the innocent ones; return "wrong", the violations, and "lives", engine deaths."""
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    from npuserve.v1 import generate_pb2 as pb
    from npuserve.v1 import inference_service_pb2_grpc as rpc

    wrong: list[str] = []
    before = server.metric("engine_restarts_total")
    with grpc.insecure_channel(server.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel, \
            ThreadPoolExecutor(len(wanted)) as threads:
        stub = rpc.InferenceServiceStub(channel)
        others = [threads.submit(stream, stub, ask) for ask in wanted]
        while server.metric("requests_running") < min(len(wanted), 32) and not all(one.done() for one in others):
            time.sleep(0.01)
        killer = pb.GenerateRequest()
        killer.token_ids.ids.extend([5, MARK, FIRST_KIND + KINDS.index(kind), 6])
        killer.stopping.max_tokens, killer.stopping.ignore_eos = 2 * DECODED, True
        killer.output.return_token_ids = True
        killer.sampling.temperature = 0.0
        began, answer, status = time.monotonic(), Answer(), "OK"
        try:
            for part in stub.StreamGenerate(killer, timeout=300):
                answer.add(part)
        except grpc.RpcError as error:
            reason = error_details_pb2.ErrorInfo()
            details = getattr(rpc_status.from_call(error), "details", ())
            status = f"{error.code().name} {next((reason.reason for one in details if one.Unpack(reason)), '')}"
        seconds = time.monotonic() - began
        if status != "INTERNAL ENGINE_KILLER":
            wrong.append(f"the faulty request ends {status} after {len(answer.ids)} tokens")
        for number, (one, other) in enumerate(zip(others, alone, strict=True)):
            try:
                if not one.result().same(other):
                    wrong.append(f"stream {number} differs")
            except (grpc.RpcError, AssertionError) as error:
                wrong.append(f"stream {number}: {error}")
        try:
            if not stream(stub, wanted[0]).same(alone[0]):
                wrong.append("the next request's answer differs")
            lives = int(server.metric("engine_restarts_total") - before)
            if lives > MAX_LIVES:
                wrong.append(f"{lives} engines died")
        except (grpc.RpcError, OSError) as error:
            wrong.append(f"the server is down: {error}")
            lives = -1
    return {"kind": kind, "status": status, "lives": lives, "seconds": round(seconds, 2),
            "innocent_seconds": round(time.monotonic() - began, 2), "tokens": len(answer.ids), "wrong": wrong}


def measure(kinds: Sequence[str], runs: int, streams: int, tokens: int, model: str = "",
            flags: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run all kinds in order; the first run that finds the server down is the last of its kind."""
    from npuserve.v1 import inference_service_pb2_grpc as rpc

    wanted, found = innocents(streams, tokens), []
    for kind in kinds:
        with serving(model, [*flags, "--hang-seconds", "5"], (__file__,)) as server:
            with grpc.insecure_channel(server.target) as channel, ThreadPoolExecutor(8) as threads:
                stub = rpc.InferenceServiceStub(channel)
                alone = list(threads.map(lambda ask, stub=stub: stream(stub, ask), wanted))
            for _ in range(runs):
                found.append(run_once(server, kind, wanted, alone))
                print(found[-1], flush=True)
                if found[-1]["lives"] < 0:
                    break
    return found


def main() -> int:
    from bench.serving.server import arguments, report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the longest innocent answer")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    args, flags = arguments(parser)
    runs = measure(args.kinds.split(","), args.runs, args.streams, args.tokens, args.model, flags)
    figures: dict[str, Any] = {"wrong": [text for one in runs for text in one["wrong"]], "rounds": runs}
    for kind in args.kinds.split(","):
        mine = [one for one in runs if one["kind"] == kind]
        figures[kind] = {"runs": len(mine), "right": sum(not one["wrong"] for one in mine),
                         "lives": sorted({one["lives"] for one in mine}),
                         "seconds_until_found": [min(one["seconds"] for one in mine),
                                                 max(one["seconds"] for one in mine)]}
    report(figures, args.json)
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2:]))
    if sys.argv[1:2] == ["engine"]:
        sys.exit(engine())
    sys.exit(main())
