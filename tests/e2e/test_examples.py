"""The programs of docs/examples in Go, Java, C++ and TypeScript: built, and run beside servers that fail.

Needs the packages that docs/examples/README.md lists; tests of a language without them are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import google.rpc
import grpc
import pytest

from npuserve.client import Client, Tls
from npuserve.service import errors
from tests.client import counting
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import processes
from tests.e2e.server import Server, serving
from tests.support.certificates import Authority, needs_openssl

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAMS = {"go": "go protoc protoc-gen-go-grpc", "java": "javac protoc grpc_java_plugin", "typescript": "node npm",
            "cpp": "cmake c++ protoc grpc_cpp_plugin pkg-config"}
"""Language -> programs that its build needs."""

pytestmark = pytest.mark.slow


@cache
def built(language: str, folder: Path) -> Path:
    """Return the program, built in the folder."""
    apis = Path(next(iter(google.rpc.__path__))).parents[1]
    done = subprocess.run([EXAMPLES / "build.sh", language, folder], capture_output=True, text=True, check=False,
                          timeout=600, env={**os.environ, "GOOGLEAPIS": str(apis)})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "stream"


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    language = request.param
    if missing := [name for name in PROGRAMS[language].split() if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    return built(language, tmp_path_factory.mktemp(language))


async def run(program: Path, *arguments: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def target(proxy: counting.Proxy) -> str:
    return f"127.0.0.1:{proxy.port}"


def by_name(server: Server) -> str:
    return server.target.replace("127.0.0.1", "localhost")


@pytest.mark.timeout(700)
async def test_it_survives_connections_that_break_at_any_byte(program: Path) -> None:
    async with counting.serving() as (_, proxy), contextlib.AsyncExitStack() as stack:
        for place in range(0, 400, 80):
            own = await stack.enter_async_context(proxy.another())
            own.cuts = [place, 3 * place % 400]
            assert await run(program, target(own), "text") == (0, counting.WHOLE + "\n", "")


async def test_it_waits_as_the_server_says_and_sends_the_request_again(program: Path) -> None:
    async with counting.serving() as (server, proxy):
        server.fail = [errors.QueueFull("the queue is full", 0.3), errors.Unavailable("restarting", 0.3)]
        began = asyncio.get_running_loop().time()
        assert await run(program, target(proxy), "text") == (0, counting.WHOLE + "\n", "")
        assert asyncio.get_running_loop().time() - began >= 0.6
        assert [name for name, *_ in server.asked] == ["StreamGenerate"] * 3


async def test_it_resumes_after_the_tokens_received(program: Path) -> None:
    async with counting.serving() as (server, proxy):
        server.fail, server.fail_after = [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE], 2
        assert await run(program, target(proxy), "text") == (0, counting.WHOLE + "\n", "")
        assert [name for name, *_ in server.asked] == ["StreamGenerate", "ResumeStream", "ResumeStream"]


async def test_it_gives_up_what_is_final_and_names_the_fields(program: Path) -> None:
    async with counting.serving() as (server, proxy):
        server.fail = [errors.InvalidField("stopping.max_tokens", "must be at least 1")]
        code, out, err = await run(program, target(proxy), "text")
        assert (code, out) == (1, "")
        assert "INVALID_FIELD" in err
        assert "stopping.max_tokens: must be at least 1" in err
        assert len(server.asked) == 1


async def test_it_gives_up_after_its_patience(program: Path) -> None:
    async with counting.serving() as (server, proxy):
        server.fail = [errors.Unavailable("restarting", 30)]
        code, _, err = await run(program, "--patience", "5", target(proxy), "text")
        assert code == 1
        assert "UNAVAILABLE" in err
        assert len(server.asked) == 1


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, Path]]:
    """Server with TLS and keys, with the files of the authority and of a key."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    pair, keys, key = authority.issue("server"), folder / "keys", folder / "key"
    key.write_text(subprocess.check_output(
        [sys.executable, "-m", "npuserve.cli", "keys", "add", keys, "alice"], text=True))
    with serving("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--api-keys", str(keys), "--frontends", "2",
                 **COUNTING) as server:
        yield server, authority.cert, key


@needs_openssl
@pytest.mark.parametrize("victim", ["engine", "frontend"])
async def test_it_streams_with_tls_and_a_key_while_processes_are_killed(
    program: Path, secured: tuple[Server, Path, Path], victim: str
) -> None:
    server, authority, key = secured
    with Client(server.target, tls=Tls(ca=authority), api_key=key.read_text().strip(), timeout=60) as client:
        whole = client.generate("Once upon a time", max_tokens=400).text
    process = await asyncio.create_subprocess_exec(
        program, "--ca", authority, "--key", key, "--timeout", "60", "--max-tokens", "400", by_name(server),
        "Once upon a time", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    first = await asyncio.wait_for(process.stdout.read(1), 30)
    for process_id in processes(server, victim):
        os.kill(process_id, signal.SIGKILL)
    rest, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, (first + rest).decode(), err.decode()) == (0, whole + "\n", "")


@needs_openssl
async def test_it_is_refused_without_a_key(program: Path, secured: tuple[Server, Path, Path]) -> None:
    server, authority, _ = secured
    code, out, err = await run(program, "--ca", str(authority), by_name(server), "text")
    assert (code, out) == (1, "")
    assert "UNAUTHENTICATED" in err
