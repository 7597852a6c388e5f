"""Cost of the history from which `npuserve explain` works: throughput of a server with it beside one without.

    python bench/serving/explain_cost.py [--model MODEL] [--streams 1,8,32] [--tokens 96] [--seconds 6] [--rounds 8]
        [-- FLAGS]

Two servers run side by side and are loaded in turn, in an order that alternates: one as it is, and one in whose engine
RequestHistory records nothing. Each stream sends one request after the other. Prints the ratio of the tokens per
second with and without the history, and of the engine's processor seconds per token: the median of the rounds, with
the range of its middle half. FLAGS are settings of both servers.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from npuserve.client import Client

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, cpu_seconds, engine_of, serving

WITHOUT_HISTORY = """
import sys
if "npuserve.service.engine.process" in " ".join(sys.orig_argv):
    from npuserve.service.engine.request_history import RequestHistory
    for name in ("observe_kernel", "observe_masks", "add", "end"):
        setattr(RequestHistory, name, lambda *_, **__: None)
    sys.stderr.write("no history\\n")
"""


def load(server: Serving, streams: int, tokens: int, seconds: float) -> tuple[float, float]:
    """Return tokens per second, and the engine's processor seconds per token."""
    counts = [0] * streams
    end = time.perf_counter() + seconds

    def stream(number: int) -> None:
        with Client(server.target) as client:
            while time.perf_counter() < end:
                answer = client.generate("Once upon a time", max_tokens=tokens, ignore_eos=True, temperature=0)
                counts[number] += answer.finish.usage.generated_tokens

    engine = engine_of(server.pid)
    cpu, began = cpu_seconds(engine), time.perf_counter()
    threads = [threading.Thread(target=stream, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began), (cpu_seconds(engine) - cpu) / sum(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or name of a model (default: the built-in one)")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=8)
    args, flags = arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(WITHOUT_HISTORY)
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        with serving(args.model, flags) as usual, serving(args.model, flags, environment={"PYTHONPATH": paths}) as bare:
            assert "no history" in bare.log
            for streams in map(int, args.streams.split(",")):
                rates, costs = [], []
                for number in range(args.rounds):
                    figures = {}
                    for server in (usual, bare)[:: 1 if number % 2 else -1]:
                        figures[server] = load(server, streams, args.tokens, args.seconds)
                    rates.append(figures[usual][0] / figures[bare][0])
                    costs.append(figures[usual][1] / figures[bare][1])
                print(f"{streams} streams: tokens/s with / without {described(rates)}, "
                      f"processor time of the engine a token {described(costs)}", flush=True)


def described(ratios: list[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0], 0, ratios[0])
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    main()
