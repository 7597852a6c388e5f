"""Helm 4 from the package helm-sdkpy, with a Kubernetes API in this process that stores all created objects.

    python -m tests.helm.helm4 <VALUES.json      a list of values; prints a list of {"error": …, "objects": […]}

The package contains Helm as a shared library (Linux on x86-64) and no command. It runs in a process of its own, since
it has a Go runtime. Only the library is used, so the package's own requirements, such as its version of Python, do not
matter:

    pip install --no-deps --ignore-requires-python helm-sdkpy==0.1.32
"""

from __future__ import annotations

import ctypes
import http.server
import importlib.util
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

from tests.helm.chart import CHART, KUBERNETES, Object

RESOURCES = {
    "v1": {"ConfigMap", "Secret", "Service", "ServiceAccount", "Pod", "PersistentVolumeClaim"},
    "apps/v1": {"Deployment"},
    "policy/v1": {"PodDisruptionBudget"},
    "networking.k8s.io/v1": {"NetworkPolicy"},
    "autoscaling/v2": {"HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {"ServiceMonitor", "PrometheusRule"},
    "keda.sh/v1alpha1": {"ScaledObject"},
    "gateway.networking.k8s.io/v1": {"GRPCRoute", "HTTPRoute"},
    "inference.networking.k8s.io/v1": {"InferencePool"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet"},
    "rbac.authorization.k8s.io/v1": {"Role", "RoleBinding"},
}
"""apiVersion -> kinds of the API."""


def library() -> Path | None:
    """Return the shared library's path, or None if it is not installed."""
    found = importlib.util.find_spec("helm_sdkpy")
    file = Path(found.origin).parent / "_lib/linux-amd64/libhelm_sdkpy.so" if found and found.origin else None
    return file if file and file.exists() and sys.platform == "linux" else None


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _discovery() -> dict[str, Object]:
    """Return path -> reply of the API's discovery."""
    groups = []
    answers: dict[str, Object] = {
        "/version": {"major": "1", "minor": KUBERNETES.split(".")[1], "gitVersion": f"v{KUBERNETES}"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for version, kinds in RESOURCES.items():
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resources = [{"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind,
                      "verbs": ["create", "get", "list", "patch", "update", "delete"]} for kind in sorted(kinds)]
        answers[path] = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if "/" in version:
            of = {"groupVersion": version, "version": version.split("/")[1]}
            groups.append({"name": version.split("/")[0], "versions": [of], "preferredVersion": of})
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return answers


class _Api(http.server.BaseHTTPRequestHandler):
    """API server with discovery and creation; no object exists before."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    discovery: ClassVar = _discovery()
    created: ClassVar[list[Object]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = self.discovery.get(self.path.split("?")[0])
        if "?labelSelector=" in self.path:
            self._reply(200, {"kind": "SecretList", "apiVersion": "v1", "items": []})
        elif found:
            self._reply(200, found)
        else:
            self._reply(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"})

    def _store(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # Helm's own record of the release is protobuf.
        is_object = self.headers["Content-Type"].startswith("application/json")
        if is_object and self.command == "POST":
            self.created.append(json.loads(body))
        self._send(201 if self.command == "POST" else 200, self.headers["Content-Type"], body)

    do_POST = do_PUT = _store

    def _reply(self, code: int, answer: Object) -> None:
        self._send(code, "application/json", json.dumps(answer).encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _kubeconfig(port: int) -> Object:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }


def main() -> None:
    file = library()
    assert file is not None
    helm = ctypes.CDLL(str(file))
    handle, text = ctypes.c_ulonglong(), ctypes.c_char_p
    helm.helm_sdkpy_config_create.argtypes = [text, text, text, text, ctypes.POINTER(ctypes.c_ulonglong)]
    helm.helm_sdkpy_install.argtypes = [ctypes.c_ulonglong, text, text, text, text, text, ctypes.POINTER(text)]
    helm.helm_sdkpy_last_error.restype = text
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        json.dump(_kubeconfig(server.server_port), config)
        config.flush()
        found = []
        options = json.dumps({"wait": False, "timeout_seconds": 60, "disable_openapi_validation": True}).encode()
        for values in json.load(sys.stdin):
            _Api.created = []
            # A client is limited to 5 requests per second after its first hundred.
            if helm.helm_sdkpy_config_create(b"llm", config.name.encode(), None, b"{}", ctypes.byref(handle)):
                sys.exit(helm.helm_sdkpy_last_error().decode())
            failed = helm.helm_sdkpy_install(handle, b"demo", str(CHART).encode(), json.dumps(values).encode(), b"",
                                             options, ctypes.byref(text()))
            found.append({"error": helm.helm_sdkpy_last_error().decode() if failed else None,
                          "objects": _Api.created})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
