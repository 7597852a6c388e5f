"""Private server of `LLM`: a child process, `npuserve serve --private`, that ends with this one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from npuserve.client.rpc_errors import ClientError

STOP_SECONDS = 30.0
"""Maximum time in which the private server ends before it is killed."""
MAX_ERROR_LINES = 20
"""Lines of the server's messages that an error quotes."""


class PrivateServer:
    """Child process `npuserve serve --private`.

    arguments: its command line after `--private`.
    address, api_key: of its gRPC server.

    Raises ValueError with its last error message if it ends before it listens.
    """

    def __init__(self, arguments: list[str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "npuserve.cli", "serve", "--private", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        self._lines: deque[str] = deque(maxlen=MAX_ERROR_LINES)
        is_listening = threading.Event()
        # Without a reference to this object, which would otherwise live as long as the process.
        self._reader = threading.Thread(
            target=_forward_stderr, args=(self._process, self._lines, is_listening), daemon=True)
        self._reader.start()
        self._finalizer = weakref.finalize(self, _stop_process, self._process)
        assert self._process.stdout is not None
        with self.explained_failure():
            line = self._process.stdout.readline()
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
            server = json.loads(line)
            self.address: str = server["address"]
            self.api_key: str = server["api_key"]
        is_listening.set()

    def stop(self) -> None:
        """End the process. Further calls do nothing."""
        self._finalizer()

    def on_end(self, call: Callable[[], None]) -> None:
        """Call a function from another thread once the process has ended."""
        threading.Thread(target=_call_at_end, args=(self._process, call), daemon=True).start()

    @contextlib.contextmanager
    def explained_failure(self) -> Iterator[None]:
        """Raise ValueError with the server's messages if the body fails because the server has ended."""
        try:
            yield
        except (ValueError, ClientError):
            if self._process.poll() is None:
                raise
            self._reader.join(STOP_SECONDS)
            raise ValueError("the private server ended: " + "\n".join(self._lines)) from None


def _forward_stderr(process: subprocess.Popen[str], lines: deque[str], is_listening: threading.Event) -> None:
    """Keep the server's last messages, and write those after it listens to stderr. An error quotes earlier ones."""
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            lines.append(line.rstrip())
            if is_listening.is_set():
                sys.stderr.write(line)


def _call_at_end(process: subprocess.Popen[str], call: Callable[[], None]) -> None:
    process.wait()
    call()


def _stop_process(process: subprocess.Popen[str]) -> None:
    """End the private server by the end of its stdin, and close its stdout."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
