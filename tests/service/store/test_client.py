"""Client and process of a store, whose values are files of a folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from npuserve.service.store import connector
from npuserve.service.store.client import LOAD_SHARE, MAX_ASKS, MAX_FAILURES, StoreClient
from npuserve.service.store.connector import UNREADABLE, StoreResult
from npuserve.service.store.messages import Call, Load, Start
from tests.support.processes import until

BLOCK_BYTES = 1 << 20
SECONDS = 20.0
KEYS = [bytes([number]) * 16 for number in range(4)]
PRESENT = [True, True, True, False]
"""After `save`."""
ABSENT = [False] * 4
COMMAND = (sys.executable, "-m", "tests.service.store.fake_process")


class Memory:
    """Slots of host memory."""

    def __init__(self) -> None:
        self.slots = [bytearray(secrets.token_bytes(BLOCK_BYTES)) for _ in range(8)]
        self.checksums = [zlib.crc32(slot) for slot in self.slots]

    def is_saved(self, slot: int) -> bool:
        return True

    def is_copying(self, slot: int) -> bool:
        return False

    def read(self, slot: int) -> memoryview | None:
        return memoryview(self.slots[slot]) if zlib.crc32(self.slots[slot]) == self.checksums[slot] else None

    def view(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def received(self, slots: Sequence[int]) -> None:
        raise NotImplementedError


class Shared:
    """Folder of a store, the secret and the model of its clients."""

    def __init__(self, folder: Path) -> None:
        self.values = folder / "values"
        self.values.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.stack = contextlib.ExitStack()

    def client(self, seconds: float = SECONDS, facts: str = "", max_saves: int = 4) -> tuple[StoreClient, Memory]:
        memory = Memory()
        start = Start(str(self.values), str(self.secret), 0, BLOCK_BYTES, facts, (str(self.model),))
        client = StoreClient(start, memory, seconds, max_saves, COMMAND)
        self.stack.callback(client.close)
        return client, memory

    def connected(self, seconds: float = SECONDS, facts: str = "") -> tuple[StoreClient, Memory]:
        client, memory = self.client(seconds, facts)
        until(lambda: client.is_available, seconds=60)
        return client, memory

    def files(self) -> list[Path]:
        return sorted(self.values.glob("npuserve.*"))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    monkeypatch.setattr(connector, "MIN_PAUSE_SECONDS", 0.1)
    shared = Shared(tmp_path)
    with shared.stack:
        yield shared


def result(client: StoreClient, begin: Callable[..., bool], *arguments: object, **options: object) -> StoreResult:
    """Make a call, and return its result."""
    assert begin(7, *arguments, **options)
    results: list[StoreResult] = []
    until(lambda: results.extend(client.take_results()) or results, seconds=60)
    assert [found.call for found in results] == [7]
    return results[0]


def lookup(client: StoreClient, keys: Sequence[bytes] = KEYS) -> list[bool]:
    """Return which values the store has; [] if the call fails."""
    found = result(client, client.lookup, keys)
    assert not found.num_values
    return [*map(bool, found.present)]


def load(client: StoreClient, keys: Sequence[bytes], slots: Sequence[int], *, is_whole: bool = False) -> int:
    return result(client, client.load, keys, slots, is_whole=is_whole).num_values


def save(client: StoreClient, count: int = 3) -> None:
    for place in range(count):
        assert save_one(client, place) == 1


def save_one(client: StoreClient, place: int = 0) -> int:
    return result(client, client.save, KEYS[place], place).num_values


def test_blocks_of_one_client_are_loaded_by_another(shared: Shared) -> None:
    first, memory = shared.connected()
    save(first)
    save(first)  # the store has them already
    second, other = shared.connected()
    assert lookup(second) == PRESENT
    assert load(second, KEYS[:3], [5, 6, 7]) == 3
    assert other.slots[5:8] == memory.slots[:3]
    assert len(shared.files()) == 3
    assert not first.failures + second.failures


@pytest.mark.parametrize("is_whole", [False, True])
def test_load_of_a_lost_value_brings_those_before_it_or_nothing(shared: Shared, is_whole: bool) -> None:
    first, memory = shared.connected()
    save(first)
    _, lost, _ = sorted(shared.files(), key=lambda file: file.stat().st_mtime_ns)
    lost.unlink()
    second, other = shared.connected()
    before = [bytes(slot) for slot in other.slots]
    assert lookup(second) == [True, False, True, False]
    assert load(second, KEYS[:3], [5, 6, 7], is_whole=is_whole) == (0 if is_whole else 1)
    assert other.slots[5] == (before[5] if is_whole else memory.slots[0])
    assert [bytes(slot) for slot in other.slots[6:]] == before[6:]
    assert second.failures == {"lost": 1}
    assert second.is_available
    assert load(second, [KEYS[0], KEYS[2]], [5, 6], is_whole=True) == 2
    assert other.slots[5:7] == [memory.slots[0], memory.slots[2]]


@pytest.mark.slow
def test_another_secret_identity_or_model_finds_nothing(shared: Shared) -> None:
    client, _ = shared.connected()
    save(client)
    other, _ = shared.connected(facts="another layout")
    assert lookup(other) == ABSENT
    (shared.model / "weights").write_text("1")
    other, _ = shared.connected()
    assert lookup(other) == ABSENT
    (shared.model / "weights").unlink()
    other, _ = shared.connected()
    assert lookup(other) == PRESENT
    shared.secret.write_text(secrets.token_hex(32))
    other, _ = shared.connected()
    assert lookup(other) == ABSENT


def test_values_reveal_nothing(shared: Shared) -> None:
    client, memory = shared.connected()
    save(client, 1)
    (file,) = shared.files()
    assert KEYS[0].hex() not in file.name
    assert bytes(memory.slots[0][:16]) not in file.read_bytes()


def test_value_of_another_block_is_corrupt_and_removed(shared: Shared) -> None:
    client, memory = shared.connected()
    save(client)
    first, second, _ = shared.files()
    changed = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(changed)
    before = [bytes(slot) for slot in memory.slots]
    assert sum(load(client, [digest], [7]) for digest in KEYS[:3]) == 1
    assert client.failures == {"corrupt": 2}
    assert len(shared.files()) == 1
    assert [bytes(slot) for slot in memory.slots[:7]] == before[:7]


@pytest.mark.parametrize("change", [lambda value: value[:-1], lambda value: b"x", lambda value: value[:-1] + b"\0\1"])
def test_changed_value_is_corrupt(shared: Shared, change: Callable[[bytes], bytes]) -> None:
    client, _ = shared.connected()
    save(client, 1)
    (file,) = shared.files()
    file.write_bytes(change(file.read_bytes()))
    assert load(client, KEYS[:1], [7]) == 0
    assert client.failures == {"corrupt": 1}
    assert client.is_available


def test_block_with_a_wrong_checksum_is_not_saved(shared: Shared) -> None:
    client, memory = shared.connected()
    memory.slots[0][5] ^= 1
    assert save_one(client) == UNREADABLE
    assert client.failures == {"corrupt": 1}
    assert not shared.files()


def test_full_store_is_counted(shared: Shared) -> None:
    client, _ = shared.connected()
    (shared.values / "full").touch()
    assert [save_one(client) for _ in range(4)] == [0] * 4
    assert client.failures == {"full": 4}
    assert client.is_available


@pytest.mark.slow
def test_slow_process_is_killed_and_the_store_tried_again(shared: Shared) -> None:
    client, _ = shared.connected(seconds=0.5)
    (shared.values / "slow").write_text("60")
    process = client._process
    began = time.monotonic()
    assert lookup(client) == []
    assert time.monotonic() - began < 10
    assert client.failures == {"timeout": 1}
    (shared.values / "slow").unlink()
    until(lambda: client.is_available, seconds=60)
    assert process
    assert process.returncode == -9
    assert lookup(client) == ABSENT


@pytest.mark.slow
def test_calls_that_wait_for_a_slow_one_end_with_it(shared: Shared) -> None:
    client, _ = shared.connected(seconds=1.0)
    (shared.values / "slow").write_text("60")
    assert all(client.lookup(call, KEYS) for call in range(5))
    results: list[StoreResult] = []
    until(lambda: results.extend(client.take_results()) or len(results) == 5, seconds=10)
    assert sorted(results) == [(call, 0, b"") for call in range(5)]
    assert not client.lookup(9, KEYS), "asked while the store does not answer"


@pytest.mark.slow
def test_load_stops_before_its_time_is_over(shared: Shared) -> None:
    """What arrived is of use, and the process lives."""
    client, memory = shared.connected()
    save(client)
    patient, other = shared.connected(seconds=8.0)
    (shared.values / "slow").write_text("3.2")
    assert load(patient, KEYS[:3], [5, 6, 7]) in (1, 2)
    assert other.slots[5] == memory.slots[0]
    assert patient.failures == {"timeout": 1}
    assert patient.is_available


def test_load_that_has_waited_is_told_the_time_that_is_left(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = shared.connected()
    sent: list[Call] = []
    send = client._send

    def record(call: Call, deadline: float) -> None:
        sent.append(call)
        send(call, deadline)

    monkeypatch.setattr(client, "_send", record)
    monkeypatch.setattr(client, "_deadline", lambda: time.monotonic() + 0.6 * SECONDS)
    load(client, KEYS[:1], [7])
    (call,) = sent
    assert isinstance(call, Load)
    assert call.seconds <= LOAD_SHARE * 0.6 * SECONDS


def test_call_that_has_waited_too_long_is_not_made(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is not killed: it is not slow."""
    client, _ = shared.connected()
    save(client)
    process = client._process
    with monkeypatch.context() as patch:
        patch.setattr(client, "_deadline", lambda: time.monotonic() + 0.4 * SECONDS)
        assert lookup(client) == []
        assert load(client, KEYS[:1], [7]) == 0
    assert client.failures == {"timeout": 2}
    assert lookup(client) == PRESENT
    assert client._process is process


def test_unexpected_error_of_a_call_does_not_end_the_client(shared: Shared) -> None:
    client, memory = shared.connected()
    del memory.checksums[5:]
    assert result(client, client.save, KEYS[0], 5).num_values == 0
    assert client.failures == {"error": 1}
    until(lambda: client.is_available, seconds=60)
    assert lookup(client) == ABSENT


def test_crashed_process_is_started_again(shared: Shared) -> None:
    client, _ = shared.connected()
    save(client)
    (shared.values / "crash").touch()
    assert lookup(client) == []
    assert client.failures == {"error": 1}
    until(lambda: client.is_available, seconds=60)
    assert lookup(client) == PRESENT


def test_failures_in_a_row_open_the_breaker(shared: Shared) -> None:
    client, _ = shared.connected()
    (shared.values / "error").touch()
    for count in range(MAX_FAILURES):
        assert client.is_available, count
        assert lookup(client) == []
    assert not client.lookup(1, KEYS)
    assert client.failures == {"error": MAX_FAILURES}


def test_calls_beyond_the_bounds_are_dropped(shared: Shared) -> None:
    client, _ = shared.connected()
    (shared.values / "slow").write_text("2")
    asked = [client.lookup(call, KEYS) for call in range(MAX_ASKS + 2)]
    saved = [client.save(100 + call, KEYS[0], 0) for call in range(6)]
    assert sum(asked) in (MAX_ASKS, MAX_ASKS + 1)  # one may be in progress
    assert saved == [True] * 4 + [False] * 2
    assert client.failures["dropped"] == MAX_ASKS + 2 - sum(asked) + 2
    (shared.values / "slow").unlink()


@pytest.mark.slow
def test_clear_removes_the_values_of_this_model(shared: Shared) -> None:
    client, _ = shared.connected()
    other, _ = shared.connected(facts="another layout")
    save(client)
    save(other, 1)
    (shared.values / "error").touch()
    client.clear()
    until(lambda: client.failures["error"] >= MAX_FAILURES, seconds=60)
    assert len(shared.files()) == 4
    (shared.values / "error").unlink()
    until(lambda: len(shared.files()) == 1, seconds=60)
    until(lambda: client.is_available, seconds=60)
    assert lookup(client) == ABSENT
    assert lookup(other) == [True, *3 * [False]]


@pytest.mark.slow
def test_nothing_is_loaded_before_a_clear_has_ended(shared: Shared) -> None:
    client, _ = shared.connected()
    save(client)
    (shared.values / "slow").write_text("0.5")
    client.clear()
    assert lookup(client) == ABSENT


def test_unusable_secret_makes_the_store_unavailable(shared: Shared) -> None:
    shared.secret.write_text("short")
    client, _ = shared.client()
    until(lambda: client.failures["error"] >= 2, seconds=60)
    assert not client.is_available


def test_process_ends_with_its_client(shared: Shared) -> None:
    client, _ = shared.connected()
    assert client._process
    pid = client._process.pid
    client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
