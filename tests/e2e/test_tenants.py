"""Isolation of tenants in a real server: priority, the prefix cache, request ids, administration."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from npuserve.cli import main as cli
from npuserve.client import Tls
from npuserve.v1 import admin_service_pb2 as admin
from npuserve.v1 import admin_service_pb2_grpc
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e.brittle import COUNTING, SLOW
from tests.e2e.server import Server, request, serving
from tests.support.certificates import Authority, needs_openssl
from tests.support.connect import connect

SECRET = "The launch code of the red rocket is four seven one one and nobody else may ever learn of it. " * 3


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Keys by name, and the path of their file: alice and bob are tenants, `urgent` may send any priority."""
    made = {"file": str(tmp_path_factory.mktemp("keys") / "keys.toml")}
    rights = {"alice": (), "bob": (), "urgent": ("--min-priority=-100",), "root": ("--admin",)}
    for name, options in rights.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["keys", "add", made["file"], name, *options]) == 0
        made[name] = out.getvalue().strip()
    return made


@pytest.fixture(scope="module")
def server(keys: dict[str, str]) -> Iterator[Server]:
    """Server with API keys and two seats, shared by the tests."""
    with serving("--api-keys", keys["file"], "--block-size", "16", "--max-num-seqs", "2", **COUNTING) as running:
        yield running


@contextlib.contextmanager
def calling(server: Server, key: str | None = None, tls: Tls | None = None) -> Iterator[grpc.Channel]:
    with connect(server.target, key, tls) as channel:
        yield channel


def code_of(call: grpc.RpcError) -> str:
    name: str = call.code().name
    return name


def administer(channel: grpc.Channel) -> list[str]:
    """Return the statuses of all calls of AdminService; Drain is last and has a grace out of range."""
    stub = admin_service_pb2_grpc.AdminServiceStub(channel)
    drain = admin.DrainRequest()
    drain.grace.seconds = -1
    found = []
    for method, message in (
        (stub.GetServerInfo, admin.GetServerInfoRequest()), (stub.FlushPrefixCache, admin.FlushPrefixCacheRequest()),
        (stub.Abort, admin.AbortRequest(request_id="none")), (stub.Drain, drain),
    ):
        try:
            method(message, timeout=60)
            found.append("OK")
        except grpc.RpcError as error:
            found.append(code_of(error))
    return found


DENIED = ["PERMISSION_DENIED"] * 4
GRANTED = ["OK", "OK", "NOT_FOUND", "INVALID_ARGUMENT"]


def test_priority_beyond_the_keys_range_is_refused(server: Server, keys: dict[str, str]) -> None:
    with calling(server, keys["alice"]) as channel, pytest.raises(grpc.RpcError) as refused:
        rpc.InferenceServiceStub(channel).Generate(request("Once", 2, priority=-100), timeout=60)
    assert code_of(refused.value) == "INVALID_ARGUMENT"
    assert refused.value.details() == "scheduling.priority: must be in [0, 100], got -100"
    with calling(server, keys["urgent"]) as channel:
        rpc.InferenceServiceStub(channel).Generate(request("Once", 2, priority=-100), timeout=60)


@pytest.mark.full
def test_without_keys_priority_has_the_settings_range_and_administration_is_off() -> None:
    with serving("--min-priority=-5", "--max-priority", "5", **COUNTING) as server:
        with pytest.raises(grpc.RpcError) as refused:
            server.stub.Generate(request("Once", 2, priority=6), timeout=60)
        assert refused.value.details() == "scheduling.priority: must be in [-5, 5], got 6"
        assert administer(server.channel) == DENIED
        assert server.process.poll() is None


def test_priority_flood_leaves_others_their_share(server: Server, keys: dict[str, str]) -> None:
    """An urgent client with 16 requests at a time cannot keep another's single one waiting."""
    total = 100
    ended, numbers = itertools.count(1), iter(range(total))
    done = [0]
    with calling(server, keys["urgent"]) as urgent, calling(server, keys["alice"]) as quiet:
        stub = rpc.InferenceServiceStub(urgent)
        lock = threading.Lock()

        def flood() -> None:
            while True:
                with lock:
                    if next(numbers, None) is None:
                        return
                stub.Generate(request("Once upon a time", 16, ignore_eos=True, priority=-100), timeout=100)
                with lock:
                    done[0] = next(ended)

        threads = [threading.Thread(target=flood, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        while done[0] < 4:
            threads[0].join(0.01)
        rpc.InferenceServiceStub(quiet).Generate(request("Once", 2), timeout=100)
        passed = done[0]
        for thread in threads:
            thread.join()
        assert done[0] == total
    assert passed < total / 2


@pytest.mark.full
@pytest.mark.parametrize("memory", ["160MiB", pytest.param("6MiB", id="few blocks")])
def test_first_token_while_another_tenant_has_all_slots(
    keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """32 streams of one tenant would take 28 s to their end. Without a server: tests/service/scheduling."""
    streams, prompt, length = 32, [5, 6, 7], 470
    slow = tmp_path / "slow"
    slow.write_text("0.06")
    monkeypatch.setenv(SLOW, str(slow))
    with (
        serving("--api-keys", keys["file"], "--kv-cache-memory", memory, "--max-num-seqs", str(streams),
                **COUNTING) as server,
        calling(server, keys["alice"]) as heavy, calling(server, keys["bob"]) as newcomer,
    ):
        stub = rpc.InferenceServiceStub(heavy)
        running = [stub.StreamGenerate(request(prompt, length, ignore_eos=True), timeout=300) for _ in range(streams)]
        while server.metric("npuserve_generation_tokens_total") < 10 * streams:
            time.sleep(0.05)
        began = time.monotonic()
        answer = rpc.InferenceServiceStub(newcomer).StreamGenerate(request([9], 8, ignore_eos=True), timeout=20)
        assert [token for part in answer for token in part.token_ids] == list(range(10, 18))
        assert time.monotonic() - began < 20
        slow.unlink()
        expected = list(range(8, 8 + length))
        assert all([token for part in stream for token in part.token_ids] == expected for stream in running)


def test_prefix_cache_tells_nothing_of_other_tenants(server: Server, keys: dict[str, str]) -> None:
    with calling(server, keys["alice"]) as alice, calling(server, keys["bob"]) as bob:
        ours, theirs = rpc.InferenceServiceStub(alice), rpc.InferenceServiceStub(bob)

        def cached(stub: rpc.InferenceServiceStub, **fields: object) -> int:
            tokens: int = stub.Generate(request(SECRET, 2, **fields), timeout=60).finish.usage.cached_tokens
            return tokens

        assert cached(ours) == 0
        assert cached(theirs) == 0, "bob learns what alice sent"
        assert cached(ours) > 0
        assert cached(theirs) > 0
        # No salt gives access to another namespace.
        assert cached(ours, cache_salt="s") == 0
        for salt in ("s", "alice", "5:alice:", "5:alice:s", "\0alice"):
            assert cached(theirs, cache_salt=salt) == 0, salt
        assert cached(ours, cache_salt="s") > 0


@pytest.mark.full
def test_prefix_cache_is_shared_where_the_operator_says_so(keys: dict[str, str]) -> None:
    with serving("--api-keys", keys["file"], "--block-size", "16", "--share-prefix-cache", "all",
                 **COUNTING) as server:
        found = []
        for name in ("alice", "bob"):
            with calling(server, keys[name]) as channel:
                answer = rpc.InferenceServiceStub(channel).Generate(request(SECRET, 2), timeout=60)
                found.append(answer.finish.usage.cached_tokens)
    assert found[0] == 0 < found[1]


def test_request_ids_of_tenants_are_apart(server: Server, keys: dict[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        channels = {name: stack.enter_context(calling(server, keys[name])) for name in ("alice", "bob", "root")}
        stubs = {name: rpc.InferenceServiceStub(channel) for name, channel in channels.items()}
        ask = request("Once upon a time", 400, ignore_eos=True, request_id="job-1")
        streams = {name: stubs[name].StreamGenerate(ask, timeout=100) for name in ("alice", "bob")}
        for name, stream in streams.items():
            assert dict(stream.initial_metadata()).get("x-request-id") == "job-1", name
        with pytest.raises(grpc.RpcError) as refused:
            stubs["alice"].Generate(ask, timeout=60)
        assert code_of(refused.value) == "ALREADY_EXISTS"
        # An administrator names whose request is meant.
        stub = admin_service_pb2_grpc.AdminServiceStub(channels["root"])
        with pytest.raises(grpc.RpcError) as refused:
            stub.Abort(admin.AbortRequest(request_id="job-1"), timeout=60)
        assert refused.value.details().startswith("client: must be set")
        stub.Abort(admin.AbortRequest(request_id="job-1", client="bob"), timeout=60)
        reasons = {name: list(stream)[-1].finish.reason for name, stream in streams.items()}
        assert reasons == {"alice": 4, "bob": 6}  # LENGTH, ABORTED


def test_administration_is_off_unless_granted(server: Server, keys: dict[str, str]) -> None:
    for name, expected in (("alice", DENIED), ("root", GRANTED)):
        with calling(server, keys[name]) as channel:
            assert administer(channel) == expected, name


@pytest.mark.slow
@needs_openssl
def test_administration_needs_a_named_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    files = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.cert))
    certificates = {name: authority.issue(name, names=f"DNS:{name}") for name in ("ops", "app")}
    with serving(*files, "--admin-certificates", "other, ops", **COUNTING) as server:
        for name, statuses in (("ops", GRANTED), ("app", DENIED)):
            own = certificates[name]
            with calling(server, tls=Tls(authority.cert, own.cert, own.key)) as channel:
                assert administer(channel) == statuses, name
