"""`ExplainRequest` of a real server names the cause that delayed a request."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from npuserve.cli import main as cli
from npuserve.v1 import admin_service_pb2 as admin
from npuserve.v1 import admin_service_pb2_grpc
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e.brittle import COUNTING, SLOW
from tests.e2e.server import Server, request, serving
from tests.support.connect import connect

pytestmark = pytest.mark.slow

SEATS = 2


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Key of the administrator, and the path of its file."""
    file = str(tmp_path_factory.mktemp("keys") / "keys.toml")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["keys", "add", file, "root", "--admin"]) == 0
    return {"file": file, "root": out.getvalue().strip()}


class Asker:
    """Caller of a server as its administrator."""

    def __init__(self, channel: grpc.Channel):
        self._stub = rpc.InferenceServiceStub(channel)
        self._admin = admin_service_pb2_grpc.AdminServiceStub(channel)

    def start(self, name: str, tokens: int, prompt: int = 4, **fields: object) -> grpc.Future:
        ids = [7 + len(name), *range(10, 9 + prompt)]  # no common prefix
        return self._stub.Generate.future(request(
            ids, tokens, request_id=name, ignore_eos=True, bypass_prefix_cache=True, **fields), timeout=120)

    def seconds(self, name: str) -> dict[str, float]:
        """Return the seconds of each cause, the longest first."""
        response = self._admin.ExplainRequest(admin.ExplainRequestRequest(request_id=name), timeout=60)
        (explained,) = response.requests
        assert explained.complete
        causes = {admin.DelayCause.Name(delay.cause).removeprefix("DELAY_CAUSE_").lower():
                  delay.duration.ToMilliseconds() / 1e3 for delay in explained.delays}
        total = explained.duration.ToMilliseconds() / 1e3
        assert sum(causes.values()) == pytest.approx(total, abs=0.1 + 0.05 * total)
        return causes


@pytest.fixture(scope="module")
def slow_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow") / "slow"


@pytest.fixture(scope="module")
def counting(keys: dict[str, str], slow_file: Path) -> Iterator[Server]:
    """Server without a model, whose steps are slow while `slow_file` exists."""
    with serving("--api-keys", keys["file"], "--max-num-seqs", str(SEATS), process={
            "env": {**os.environ, SLOW: str(slow_file)}}, **COUNTING) as server:
        yield server


def test_explain_names_the_queue(counting: Server, keys: dict[str, str]) -> None:
    with connect(counting.target, keys["root"]) as channel:
        asker = Asker(channel)
        running = [asker.start(f"busy-{number}", 400) for number in range(SEATS)]
        time.sleep(0.2)
        asker.start("queued", 5).result()
        for call in running:
            call.result()
        causes = asker.seconds("queued")
    assert next(iter(causes)) == "queue"
    assert causes["queue"] > sum(causes.values()) / 2


def test_explain_names_slow_steps(counting: Server, keys: dict[str, str], slow_file: Path) -> None:
    with connect(counting.target, keys["root"]) as channel:
        asker = Asker(channel)
        asker.start("usual", 400).result()
        call = asker.start("slow", 400)
        time.sleep(0.2)
        slow_file.write_text("0.1")
        time.sleep(2)
        slow_file.unlink()
        call.result()
        usual, slow = asker.seconds("usual"), asker.seconds("slow")
    assert next(iter(slow)) == "slow_steps"
    assert slow["slow_steps"] > 1.0
    assert usual["decode"] > 0
    assert usual.get("slow_steps", 0.0) < slow["slow_steps"] / 2  # a loaded machine has some


def test_explain_of_a_live_request_says_so(counting: Server, keys: dict[str, str]) -> None:
    with connect(counting.target, keys["root"]) as channel:
        call = Asker(channel).start("live", 450)
        time.sleep(0.3)
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        (explained,) = stub.ExplainRequest(admin.ExplainRequestRequest(request_id="live"), timeout=60).requests
        call.cancel()
    assert explained.live
    assert 0 < explained.generated_tokens < 450


@pytest.mark.full
def test_explain_names_preemption(keys: dict[str, str]) -> None:
    """Another client takes turns with the only place."""
    with serving("--api-keys", keys["file"], "--max-num-seqs", "1", **COUNTING) as server:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["keys", "add", keys["file"], "other"]) == 0
        while "read again" not in server.log:
            time.sleep(0.1)
        with connect(server.target, keys["root"]) as mine, connect(server.target, out.getvalue().strip()) as theirs:
            asker = Asker(mine)
            call = asker.start("long", 450)
            time.sleep(0.2)
            Asker(theirs).start("newcomer", 300).result()
            call.result()
            causes = asker.seconds("long")
    assert set(list(causes)[:2]) == {"preemption", "decode"}
    assert causes["preemption"] > 0.3


@pytest.mark.full
def test_explain_names_the_prompts_of_neighbours_and_the_grammar(keys: dict[str, str]) -> None:
    """By default without a server in tests/service/engine/test_request_history.py."""
    with serving("--api-keys", keys["file"], "--max-num-batched-tokens", "512") as server, \
            connect(server.target, keys["root"]) as channel:
        asker = Asker(channel)
        asker.start("usual", 100).result()
        stop = threading.Event()

        def prompts() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                asker.start("x" * number, 1, prompt=400).result()

        neighbour = threading.Thread(target=prompts)
        neighbour.start()
        try:
            asker.start("beside", 100).result()
        finally:
            stop.set()
            neighbour.join()
        beside = asker.seconds("beside")
        asker.start("constrained", 5, regex="[a-z ]{20,400}x{3,90}(a|b)+").result()
        constrained = asker.seconds("constrained")
    assert next(iter(beside)) == "neighbour_prefill"
    assert constrained["grammar"] > 0
