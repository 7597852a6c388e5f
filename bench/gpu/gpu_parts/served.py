"""`npuserve serve` through gRPC and the engine's own speed, by bench/serving/served.py, with random weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_parts.shapes import place_of, random_folder
from gpu_parts.worker import Context, Units

SCRIPT = Path(__file__).resolve().parents[2] / "serving" / "served.py"
NEEDED = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google.protobuf", "msgspec", "prometheus_client",
          "rich", "jinja2", "tokenizers", "huggingface_hub")
WHOLE_SECONDS = 240
"""Budget from which Qwen3-14B is served, too: engine and server read its 30 GB for each number of streams."""

TITLE = "Served through gRPC"
NO_SPACE = "not run: no space for a checkpoint in memory or among temporary files"


def units(context: Context) -> Units:
    whole = context.args.budgets["served"] >= WHOLE_SECONDS
    for shape in ("toy",) if context.toy else ("qwen3-0.6b", *(["qwen3-14b"] if whole else [])):
        yield shape, lambda shape=shape: _served(context, shape)


def _served(context: Context, shape: str) -> Iterator[dict[str, Any]]:
    if said := refusal():
        yield {"table": TITLE, "model": shape, "said": said}
        return
    streams, prompt, output, requests = ((2,), 4, 2, 1) if context.toy else ((64, 256), 128, 64, 2)
    if (place := place_of(shape)) is None:
        yield {"table": TITLE, "model": shape, "said": NO_SPACE}
        return
    with tempfile.TemporaryDirectory(dir=place) as base:
        folder = random_folder(shape, Path(base, shape), context.backend, context.args.seed)
        context.release()
        flags = ["--device", context.args.device, *(["--emulate"] if context.args.emulate else []),
                 "--max-num-seqs", str(max(streams)), "--max-model-len", str(prompt + output + 64)]
        if context.toy:
            flags += ["--max-num-batched-tokens", "4", "--decode-buckets", "1,2", "--kv-cache-memory", "16MiB"]
        command = [sys.executable, str(SCRIPT), str(folder), "--streams", ",".join(map(str, streams)), "--prompt",
                   str(prompt), "--output", str(output), "--requests", str(requests), "--rounds", "1", "--", *flags]
        done = subprocess.run(command, capture_output=True, text=True,
                              env=os.environ | {"PYTHONSAFEPATH": "1"})  # no module of that folder hides a package
    if done.returncode:
        raise RuntimeError(f"bench/serving/served.py: {(done.stderr + done.stdout).strip()[-3000:]}")
    for match in re.finditer(r"(\d+) streams: engine (\d+), served (\d+) tokens/s, ratio ([\d.]+)", done.stdout):
        yield {"table": TITLE, "model": shape, "streams": int(match[1]), "prompt": prompt,
               "output": output, "engine tokens/s": int(match[2]), "served tokens/s": int(match[3]),
               "served / engine": float(match[4])}
    if not re.search("streams: engine", done.stdout):
        raise RuntimeError(f"bench/serving/served.py said {json.dumps(done.stdout[-500:])}")


def refusal() -> str:
    """Return why no server can run here, "" if one can."""
    missing = [name for name in NEEDED if not _found(name)]
    return f"not run: {', '.join(missing)} not there; see --wheels" if missing else ""


def _found(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: of a stand-in
        return False
    return spec is not None
