"""A kubelet for one container: environment, probes, preStop, SIGTERM, grace period, SIGKILL.

The pod is as rendered by the chart. Volumes are folders under a root folder, which replaces `/` in all mounted paths;
nothing else of the pod is changed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import MOUNT_NAMESPACE

Object = dict[str, Any]
# Each mount under / has flags of its own and is made read-only, except for the one mount of the volumes.
READ_ONLY = """
mount --bind "$0" "$0"
while read -r _ _ _ _ at _; do
    case "$at" in "$0"|/proc*|/sys*|/dev|/dev/*) ;; *) mount -o remount,bind,ro "$at" 2>/dev/null;; esac
done < /proc/self/mountinfo
[ -w /usr ] && exit 99
exec "$@"
"""
ENTRYPOINTS = {"npuserve": [sys.executable, "-m", "npuserve.cli"]}


def entrypoint(dockerfile: Path) -> list[str]:
    """Return the entrypoint of an image, with the program of this tree."""
    found = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile.read_text(), re.MULTILINE)
    assert found is not None
    program, *arguments = json.loads(found.group(1))
    return [*ENTRYPOINTS[program], *arguments]


def cores(quantity: str | int | float) -> int:
    """Return a CPU quantity as resourceFieldRef does: whole cores, rounded up."""
    text = str(quantity)
    return math.ceil(float(text[:-1]) / 1000 if text.endswith("m") else float(text))


class Container:
    """The pod's one container. config: file name -> content in the volume config."""

    def __init__(self, spec: Object, config: dict[str, str], image_entrypoint: list[str], root: Path):
        (self.spec,) = spec["containers"]
        self.grace = float(spec["terminationGracePeriodSeconds"])
        self._root = root
        self._mounts = [mount["mountPath"] for mount in self.spec["volumeMounts"]]
        for mount in self._mounts:
            self._path(mount).mkdir(parents=True)
        (target,) = [m["mountPath"] for m in self.spec["volumeMounts"] if m["name"] == "config"]
        for name, text in config.items():
            for mount in self._mounts:
                text = text.replace(f'"{mount}"', f'"{self._path(mount)}"')
            (self._path(target) / name).write_text(text)
        self._command = [*self.spec.get("command", image_entrypoint), *self.spec.get("args", [])]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("NPUSERVE_")}
        self._environment |= {v["name"]: self._value(v) for v in self.spec["env"]}
        self._log = (root / "log").open("w+")

    def start(self, read_only: bool = False) -> None:
        """Start the container. read_only: only the volumes are writable, as with readOnlyRootFilesystem."""
        if read_only:
            self._command = [*MOUNT_NAMESPACE, "sh", "-c", READ_ONLY, str(self._root),
                             *self._command]
        self.process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.DEVNULL,
                                        stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return (self._root / "log").read_text()

    def probe(self, name: str) -> bool:
        """Probe once, on a new connection as the kubelet does. name: startup, readiness, liveness."""
        asked = self.spec[f"{name}Probe"]
        target, own = f"127.0.0.1:{asked['grpc']['port']}", [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(target, own) as channel:
            request = health_pb2.HealthCheckRequest(service=asked["grpc"]["service"])
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=asked.get("timeoutSeconds", 1))
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def succeed(self, name: str, every: float) -> None:
        """Probe until success, in at most the pod's total time. every: seconds between probes."""
        asked = self.spec[f"{name}Probe"]
        deadline = time.monotonic() + asked["periodSeconds"] * asked["failureThreshold"]
        while not self.probe(name):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"the kubelet would give up on {name}:\n{self.log}"
            time.sleep(every)

    def terminate(self, before_signal: Callable[[], None]) -> tuple[int, bool]:
        """Run preStop, send SIGTERM, and SIGKILL after the grace period; return (exit code, was killed)."""
        over = threading.Timer(self.grace, self.process.kill)
        over.start()
        subprocess.run(self.spec["lifecycle"]["preStop"]["exec"]["command"], check=True)
        before_signal()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        killed = not over.is_alive()
        over.cancel()
        return code, killed

    def close(self) -> None:
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _path(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _value(self, variable: Object) -> str:
        if "value" in variable:
            value: str = variable["value"]
            mounted = any(f"{value}/".startswith(f"{mount}/") for mount in self._mounts)
            return str(self._path(value)) if mounted else value
        asked = variable["valueFrom"]["resourceFieldRef"]
        part, resource = asked["resource"].split(".")
        assert resource == "cpu"
        return str(cores(self.spec["resources"][part][resource]))
