"""The environment that joins hosts: what is accepted, and the sentence for each contradiction."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.storyteller import FOLDER
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.ranks.world import NAMES, World, check_same, local_ranks, read_world

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29400"}
LWS = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "first"}
CONFIG = ServerConfig(tensor_parallel_size=4)


def test_no_environment_is_one_host():
    assert read_world(CONFIG, {"MASTER_ADDR": "first", "MASTER_PORT": "1"}) is None
    assert local_ranks(CONFIG, {}) == 4


@pytest.mark.parametrize(("environment", "wanted"), [
    (TORCHRUN, World(1, 2, "first", 29400, NAMES[0])),
    (LWS, World(1, 2, "first", 29500, NAMES[1])),
    ({**LWS, "MASTER_PORT": "65535"}, World(1, 2, "first", 65535, NAMES[1])),
    ({**TORCHRUN, **LWS}, World(1, 2, "first", 29400, NAMES[0])),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, World(1, 2, "first", 29400, NAMES[0])),
    ({**LWS, "LOCAL_WORLD_SIZE": "2"}, World(1, 2, "first", 29500, NAMES[1])),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1", "LWS_LEADER_ADDRESS": "first"}, None),
])
def test_environment_gives_the_group(environment: dict[str, str], wanted: World | None):
    assert read_world(CONFIG, environment) == wanted


def test_ranks_are_divided_in_the_order_of_hosts():
    worlds = [read_world(CONFIG, {**TORCHRUN, "RANK": str(host)}) for host in range(2)]
    assert [list(world.ranks(CONFIG)) for world in worlds if world] == [[0, 1], [2, 3]]
    assert local_ranks(CONFIG, TORCHRUN) == 2


WRONG = [
    ({**TORCHRUN, "RANK": "2"}, "RANK: '2' must be a whole number in [0, 1]"),
    ({**TORCHRUN, "RANK": "-1"}, "RANK: '-1' must be a whole number in [0, 1]"),
    ({**TORCHRUN, "RANK": ""}, "RANK: '' must be a whole number in [0, 1]"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "first"}, "RANK: is needed with WORLD_SIZE, a whole number in [0, 1]"),
    ({"RANK": "0", "MASTER_ADDR": "first"}, "WORLD_SIZE: is needed with RANK, a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' must be a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE: '0' must be a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "²"}, "WORLD_SIZE: '²' must be a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "\u0662"}, "must be a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "must be a whole number in [1, 64]"),
    ({**TORCHRUN, "WORLD_SIZE": "3"}, "tensor_parallel_size: 4 is not a multiple of 3, the hosts of WORLD_SIZE"),
    ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR: is needed with WORLD_SIZE, an address of the host with RANK 0"),
    ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT: '0' must be a whole number in [1, 65535]"),
    ({**LWS, "MASTER_PORT": "65536"}, "MASTER_PORT: '65536' must be a whole number in [1, 65535]"),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE: '2' must be 1: npuserve is started once on each host"),
    ({**LWS, "LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX: '2' must be a whole number in [0, 1]"),
    ({"LWS_WORKER_INDEX": "0"}, "LWS_GROUP_SIZE: is needed with LWS_WORKER_INDEX, a whole number in [1, 64]"),
    ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"},
     "LWS_LEADER_ADDRESS: is needed with LWS_GROUP_SIZE, an address of the host with LWS_WORKER_INDEX 0"),
    ({**TORCHRUN, **LWS, "WORLD_SIZE": "4"},
     "RANK and WORLD_SIZE: host 1 of 4, the first at first, but LWS_WORKER_INDEX and LWS_GROUP_SIZE: host 1 of 2, "
     "the first at first; set one of the two"),
    ({**TORCHRUN, **LWS, "MASTER_ADDR": "other"}, "host 1 of 2, the first at other, but"),
    ({**LWS, "RANK": "0", "WORLD_SIZE": "1"}, "host 0 of 1, the first at no address, but"),
]


@pytest.mark.parametrize(("environment", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_environment_is_named_with_its_range(environment: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        read_world(CONFIG, environment)
    assert "\n" not in str(raised.value)


def world(name: str, port: int = 29500) -> World:
    return World(0, 2, name, port, NAMES[0])


def test_address_that_does_not_resolve_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A name of LeaderWorkerSet resolves once the leader's pod has an address."""
    asked: list[str] = []

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr("npuserve.service.ranks.world.RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    world("late").resolve(10)
    assert asked == ["late"] * 3
    assert [record.getMessage() for record in caplog.records] == ["waiting for the address of the first host"]


@pytest.mark.parametrize("name", ["npuserve.invalid", "a" * 64, "first host"])
def test_address_that_never_resolves_is_named(name: str):
    with pytest.raises(ConfigError, match=rf"^MASTER_ADDR: {name} does not resolve: .+; waited 0.1 s$"):
        world(name).resolve(0.1)


def test_wait_for_an_address_ends_when_stopped():
    stopped, began = threading.Event(), time.monotonic()
    threading.Timer(0.2, stopped.set).start()
    world("npuserve.invalid").resolve(600, stopped)
    assert time.monotonic() - began < 60


def test_explanation_names_the_port_or_the_address():
    error = RuntimeError("the store has timed out\nwith a stack")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(world("10.0.0.1", port).explain(error)) == (
            f"MASTER_PORT: cannot listen on port {port}: Address already in use")
    assert str(world("10.0.0.1", port).explain(error)) == (
        f"MASTER_ADDR: 10.0.0.1:{port} does not answer here, where RANK is 0; it must be an address of this host: "
        "the store has timed out")


class FakeGroup:
    """Group of two ranks, which are threads. others: the state that both share; None for rank 0, which makes it."""

    size = 2

    def __init__(self, others: FakeGroup | None = None):
        self.rank = int(others is not None)
        self._barrier: threading.Barrier = others._barrier if others else threading.Barrier(2)
        self._values: dict[int, Any] = others._values if others else {}

    def broadcast(self, message: bytes) -> bytes:
        found: bytes = self._exchange(message)[0]
        return found

    def minimum(self, number: int) -> list[int]:
        return [min(self._exchange(number).values())]

    def _exchange(self, value: object) -> dict[int, Any]:
        """Return the values of both ranks."""
        self._values[self.rank] = value
        self._barrier.wait(60)
        found = dict(self._values)
        self._barrier.wait(60)
        return found


def changed(folder: Path, file: str) -> Path:
    """Save the folder of a model without weights that has another content of one file."""
    folder.mkdir()
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"weights")
    with (folder / file).open("a") as opened:
        opened.write(" ")
    return folder


@pytest.mark.parametrize(("settings", "file", "wrong"), [
    ({}, "README.md", ""), ({"port": 1, "threads": 9}, "README.md", ""),
    ({"dtype": "float32"}, "README.md", "settings"), ({}, "config.json", "model"), ({}, "model.safetensors", "model"),
    ({"block_size": 32}, "config.json", "settings, model")])
def test_rank_that_differs_is_named_by_both(
    settings: dict[str, Any], file: str, wrong: str, tmp_path: Path
) -> None:
    first = FakeGroup()
    ranks = [(first, CONFIG, changed(tmp_path / "first", "README.md")),
             (FakeGroup(first), ServerConfig(tensor_parallel_size=4, **settings), changed(tmp_path / "second", file))]

    def error(rank: tuple[Any, ServerConfig, Path]) -> str:
        try:
            check_same(*rank)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(error, ranks))
    assert said == ([
        "rank 1 differs from rank 0 in version, settings or model; its log says in which",
        f"rank 1 and rank 0 differ in {wrong}; all ranks need the same"] if wrong else ["", ""])
