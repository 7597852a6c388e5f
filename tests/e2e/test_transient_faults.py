"""Transient and repairable faults: the server stays up, and serves again after them.

Most engines count instead of computing the model, which these faults do not concern.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from bench.serving.server import descendants
from npuserve.cli import keys
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, prompt_pb2
from tests.e2e import brittle
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import children, engine_of, until
from tests.e2e.server import KV_CACHE_MEMORY, Server, request, serving, streamed
from tests.e2e.test_lifecycle import is_serving
from tests.support.certificates import Authority, needs_openssl
from tests.support.processes import ignores, is_running

pytestmark = pytest.mark.slow
PROMPT = request("Once upon a time", 8)


@pytest.fixture(scope="module")
def load_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with the fault of the next load of `loading`'s engine."""
    file: Path = tmp_path_factory.mktemp("faults") / "load"
    return file


@pytest.fixture(scope="module")
def loading(load_file: Path) -> Iterator[Server]:
    """Server whose first load takes longer than the limit of later loads, shared by the tests of faults of a load.

    Each leaves it ready.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(brittle.LOAD, str(load_file))
        patch.setenv(brittle.LOAD_LIMIT, "1")
        load_file.write_text("slow:1.5")
        with serving(**COUNTING) as running:
            load_file.unlink()
            yield running


@pytest.fixture(scope="module")
def server_folder() -> Iterator[Path]:
    """TMPDIR of `server`, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def server(server_folder: Path) -> Iterator[Server]:
    """Server shared by tests that leave it ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(server_folder))
        with serving("--debuggable", **COUNTING) as running:
            yield running


def kill(server: Server, pid: int) -> None:
    """Kill a child and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in dict(descendants(server.process.pid)))


def until_serving(server: Server) -> None:
    until(lambda: server.process.poll() is not None or is_serving(server), server)
    assert server.process.poll() is None, server.log
    assert len(streamed(server.stub, PROMPT)[1]) == 8


def private_folder(parent: Path) -> Path:
    (found,) = parent.glob("npuserve-*")
    return found


def call(server: Server, key: str) -> grpc.StatusCode:
    try:
        server.stub.Generate(PROMPT, timeout=60, metadata=[("authorization", f"Bearer {key}")])
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_front_end_dies_while_the_keys_file_is_broken_keeps_the_old_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"

    def add(name: str) -> str:
        arguments = {"action": "add", "file": str(file), "name": name, "admin": False, "max_requests": None,
                     "min_priority": None, "max_priority": None}
        assert keys.run(type("Arguments", (), arguments)()) == 0  # type: ignore[arg-type]
        return capsys.readouterr().out.strip()

    alice = add("alice")
    good = file.read_text()
    with serving("--api-keys", str(file), **COUNTING) as server:
        assert call(server, alice) is grpc.StatusCode.OK
        # At once, since a front end may read the file at any time.
        broken = tmp_path / "broken"
        broken.write_text("this is not TOML [")
        broken.replace(file)
        kill(server, children(server)["frontend"])
        until(lambda: server.process.poll() is not None or is_serving(server), server)
        assert server.process.poll() is None, server.log
        assert call(server, alice) is grpc.StatusCode.OK
        assert call(server, "nobody's") is grpc.StatusCode.UNAUTHENTICATED
        assert server.metric("npuserve_settings_not_read_total", setting="api_keys") >= 1
        assert "not read, the last good one stays" in server.log
        file.write_text(good)
        bob = add("bob")
        until(lambda: call(server, bob) is grpc.StatusCode.OK)
        assert server.stop() == 0


@pytest.mark.full
@needs_openssl
def test_front_end_dies_while_the_certificate_is_broken_is_retried(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    pair = Authority(tmp_path).issue("server")
    good = pair.cert.read_bytes()
    flags = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--health-port", str(free_port()))
    with serving(*flags, **COUNTING) as server:
        pair.cert.write_text("no certificate")
        kill(server, children(server)["frontend"])
        unusable = {"process": "frontend", "why": "unusable"}
        until(lambda: server.process.poll() is not None
              or server.metric("npuserve_process_failures_total", **unusable) >= 1, server)
        assert server.process.poll() is None, server.log
        assert "frontend-0 cannot be used" in server.log
        pair.cert.write_bytes(good)
        until(lambda: server.metric("npuserve_ready") == 1)
        assert server.stop() == 0


def test_engine_that_hangs_while_it_loads_again_is_killed(loading: Server, load_file: Path) -> None:
    """The first load, which took longer than the limit, is only logged."""
    server = loading
    assert "engine is still loading" in server.log
    assert "hangs while loading" not in server.log
    load_file.write_text("hang")
    kill(server, engine_of(server))
    until(lambda: "engine hangs while loading, killing it" in server.log, server, 200)
    load_file.unlink()
    until_serving(server)
    assert server.metric("npuserve_process_failures_total", process="engine", why="hung") >= 1
    until(lambda: server.metric("npuserve_engine_loading_seconds") == 0)


def test_memory_that_is_not_free_at_a_restart_is_waited_for(loading: Server, load_file: Path) -> None:
    server, unusable = loading, {"process": "engine", "why": "unusable"}
    load_file.write_text("memory")
    kill(server, engine_of(server))
    until(lambda: server.process.poll() is not None
          or server.metric("npuserve_process_failures_total", **unusable) >= 2, server)
    assert server.process.poll() is None, server.log
    load_file.unlink()
    until_serving(server)


def test_helper_that_has_the_engines_stdout_open_delays_no_restart(loading: Server, load_file: Path) -> None:
    server, pid_file = loading, Path(f"{load_file}.pid")
    load_file.write_text("helper")
    kill(server, engine_of(server))
    until_serving(server)
    helper = int(pid_file.read_text())
    load_file.unlink()
    try:
        restarts = server.metric("npuserve_engine_restarts_total")
        os.kill(engine_of(server), signal.SIGKILL)
        until(lambda: server.metric("npuserve_engine_restarts_total") == restarts + 1)
        until_serving(server)
        os.kill(helper, 0)  # it is still there
    finally:
        os.kill(helper, signal.SIGKILL)


def test_orphans_of_the_engine_are_reaped(loading: Server, load_file: Path) -> None:
    """The server is a subreaper. As process 1: test_orphans_of_the_engine_are_reaped_by_process_1."""
    load_file.write_text("orphan")
    kill(loading, engine_of(loading))
    check_orphans_are_reaped(loading, load_file, loading.process.pid)
    load_file.unlink()
    until_serving(loading)


def test_sigterm_to_all_processes_while_the_engine_loads_again(loading: Server, load_file: Path) -> None:
    """The load continues in the drain, as systemd sends the signal to all of them. Last test of the shared server."""
    server = loading
    call = server.stub.StreamGenerate(request("Once upon a time", 400, ignore_eos=True), timeout=60)
    tokens, deaths = len(next(call).token_ids), server.log.count("starting it again")
    load_file.write_text("hold")
    kill(server, engine_of(server))
    signal_all_while_the_engine_loads(server)
    until(lambda: "draining" in server.log)
    load_file.unlink()
    assert tokens + sum(len(part.token_ids) for part in call) == 400
    assert server.process.wait(60) == 0
    assert server.log.count("starting it again") == deaths + 1


def signal_all_while_the_engine_loads(server: Server) -> None:
    until(lambda: ignores(engine_of(server), signal.SIGTERM), server)
    for pid in (*children(server).values(), server.process.pid):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.full
def test_drain_ends_while_the_engine_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/service/supervisor/test_supervisor.py, with a stream."""
    load_file = tmp_path / "load"
    monkeypatch.setenv(brittle.LOAD, str(load_file))
    with serving("--drain-seconds", "1", **COUNTING) as server:
        call = server.stub.StreamGenerate(request("Once upon a time", 400, ignore_eos=True), timeout=60)
        next(call)
        load_file.write_text("hold")
        kill(server, engine_of(server))
        signal_all_while_the_engine_loads(server)
        with pytest.raises(grpc.RpcError, match="its output is lost"):
            list(call)
        assert server.process.wait(60) == 0
        assert server.log.count("starting it again") == 1


def test_no_process_can_be_started_is_waited_for(server: Server) -> None:
    """The supervisor reaches its limit of open files; RLIMIT_NPROC does not apply to root."""
    supervisor = server.process.pid
    limit = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path(f"/proc/{supervisor}/fd").iterdir())
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (used + 1, limit[1]))
    os.kill(engine_of(server), signal.SIGKILL)
    until(lambda: server.process.poll() is not None or server.log.count("Too many open files") >= 2)
    assert server.process.poll() is None, server.log
    assert "Traceback" not in server.log
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limit)
    until_serving(server)
    assert server.metric("npuserve_process_failures_total", process="engine", why="not_started") >= 2


def test_idle_connections_to_the_metrics_port_take_no_threads_and_few_files(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        port = int(server.metrics_url.split(":")[2].partition("/")[0])
        for _ in range(240):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert server.metric("npuserve_ready") == 1  # served in order of arrival: all are accepted
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
        assert threads
        assert int(threads[1]) <= 10
        until(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) <= 80)


def test_broken_metrics_files_are_skipped_and_an_engine_death_is_survived(
    server: Server, server_folder: Path
) -> None:
    folder = private_folder(server_folder)
    garbage = struct.pack("=ii", 64, 0) + b"\xff" * 92
    (folder / "counter_4000000.db").write_bytes(garbage)
    (folder / "gauge_livesum_4000001.db").write_bytes(b"\x01")
    (folder / "histogram_4000002.db").touch()
    assert server.metric("npuserve_ready") == 1
    broken = engine_of(server)
    os.kill(broken, signal.SIGSTOP)  # it has the file mapped
    (folder / f"counter_{broken}.db").write_bytes(garbage)
    kill(server, broken)
    until_serving(server)
    assert server.metric("npuserve_metrics_files_skipped_total") == 3
    assert server.log.count("a metrics file cannot be read") == 3
    assert not list(folder.glob(f"*_{broken}.db"))


def test_killed_supervisor_takes_its_children_with_it(server: Server, server_folder: Path) -> None:
    """The engine is stopped and the front end has a running stream. Last test of the shared server.

    The next start removes the leftover folder: tests/service/supervisor/test_private_folder.py.
    """
    folder = private_folder(server_folder)
    pids = list(children(server).values())
    stream = server.stub.StreamGenerate(request("Once upon a time", 400, ignore_eos=True))
    next(iter(stream))
    os.kill(engine_of(server), signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    try:
        until(lambda: not any(map(is_running, pids)))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    host, _, port = server.target.rpartition(":")

    def is_free() -> bool:  # once all threads of the processes have ended
        with contextlib.suppress(OSError), socket.create_server((host, int(port))):
            return True
        return False

    until(is_free)
    assert folder.exists()


@pytest.mark.full
def test_full_log_pipe_stops_nothing(free_port: Callable[[], int]) -> None:
    """A pipe of one page is full after a few requests, each of which is logged with its prompt."""
    import fcntl

    port = free_port()
    command = [sys.executable, *COUNTING["program"], "--port", str(port), "--metrics-port", "0", "--log-prompts"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            until(lambda: answers(stub))
            for _ in range(60):
                ask = request("Once upon a time there was a little girl. " * 20, 2, ignore_eos=True)
                assert stub.Generate(ask, timeout=60).finish.usage.generated_tokens == 2
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def answers(stub: inference_service_pb2_grpc.InferenceServiceStub) -> bool:
    try:
        stub.Generate(PROMPT, timeout=60)
    except grpc.RpcError:
        return False
    return True


def has_pid_namespaces() -> bool:
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.run(
        [str(unshare), "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(not has_pid_namespaces(), reason="no right to make a namespace of processes")
def test_orphans_of_the_engine_are_reaped_by_process_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_file = tmp_path / "load"
    monkeypatch.setenv(brittle.LOAD, str(load_file))
    load_file.write_text("orphan")
    before = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with serving(before=before, **COUNTING) as server:
        unshare = server.process.pid
        supervisor = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())
        check_orphans_are_reaped(server, load_file, supervisor)
        os.kill(supervisor, signal.SIGTERM)  # unshare does not forward signals
        assert server.process.wait(60) == 0


def check_orphans_are_reaped(server: Server, load_file: Path, supervisor: int) -> None:
    """Wait until the supervisor has adopted the orphan of a load, and, once the orphan ends, until it has reaped it."""
    def adopted() -> set[int]:
        return {pid for pid, args in descendants(supervisor) if not re.search("npuserve|brittle", args)}

    until(adopted, server)
    Path(f"{load_file}.end").touch()
    until(lambda: not adopted(), server)


WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-sys_ptrace,-perfmon,-sys_admin,-checkpoint_restore",
                        "--inh-caps=-all") if os.getuid() == 0 else ()
"""Prefix of a command. Root needs capabilities to read another process."""
needs_setpriv = pytest.mark.skipif(not shutil.which("setpriv"), reason="no program setpriv")


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["closed", "debuggable"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Server in `tmp_path` that may write core files, without the capabilities to read other processes."""
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.getcwd()])}
    # The shell's limit, since a function before exec could deadlock in gRPC.
    before = (*WITHOUT_CAPABILITIES, "sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh")
    with serving(str(folder), "--kv-cache-memory", KV_CACHE_MEMORY, *["--debuggable"] * request.param, before=before,
                 process={"cwd": tmp_path, "env": environment}) as server:
        yield server


@needs_setpriv
def test_memory_and_environment_are_closed_to_the_same_user_and_no_core_is_written(
    served: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    script = ("import sys\nfor pid in sys.argv[1:]:\n  for file in ('environ', 'maps'):\n    try:\n"
              "      open(f'/proc/{pid}/{file}').read(1); print('open')\n"
              "    except PermissionError:\n      print('closed')")
    frontend = children(served)["frontend"]
    until(lambda: bool(list(descendants(frontend))))
    pids = [served.process.pid, *children(served).values(), *dict(descendants(frontend))]
    assert len(pids) == 4
    served.stub.Generate(generate_pb2.GenerateRequest(chat=prompt_pb2.Chat(messages=[
        prompt_pb2.Message(role="user", content="hi")])), timeout=60)  # the template's process is set up
    done = subprocess.run([*WITHOUT_CAPABILITIES, sys.executable, "-c", script, *map(str, pids)], capture_output=True,
                          text=True, check=True)
    is_debuggable = "debuggable" in request.node.callspec.id
    assert done.stdout.split() == ["open" if is_debuggable else "closed"] * 2 * len(pids)
    if is_debuggable or Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/")):
        return  # core files have a place elsewhere
    os.kill(frontend, signal.SIGSEGV)
    until(lambda: children(served).get("frontend") not in (frontend, None))
    assert not list(tmp_path.glob("core*"))
