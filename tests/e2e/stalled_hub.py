"""A model hub that stops replying, for `npuserve serve ORGANISATION/NAME` on a bad network."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40
FILES = ("config.json", "tokenizer.json", "model.safetensors")


class StalledHub:
    """Server of the hub's API at `url`, until `close`.

    stalls: "api" for no reply at all, "files" for headers of each file without a body.
    environment: variables that direct the hub's client to this hub, with its cache in `cache`.
    requests: (method, path) of each request.
    stalled: event, set once a client waits.
    """

    def __init__(self, stalls: str, cache: Path):
        self.requests: list[tuple[str, str]] = []
        self.stalled = threading.Event()
        self._over = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append((self.command, path))
                if "/resolve/" not in path and stalls != "api":
                    self._send(json.dumps(hub._listing(path)).encode())
                elif self.command == "HEAD":
                    self._send(b"x" * 1000, {"ETag": f'"{path.rpartition("/")[2]}"', "X-Repo-Commit": COMMIT})
                else:
                    if stalls == "files":
                        self.send_response(200)
                        self.send_header("Content-Length", "1000")
                        self.end_headers()
                    hub.stalled.set()
                    hub._over.wait()
                    self.close_connection = True

            do_HEAD = do_GET

            def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(200)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0",
                            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def _listing(path: str) -> object:
        if "/tree/" in path:
            return [{"type": "file", "path": name, "size": 1000, "oid": "1" * 40} for name in FILES]
        return {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
